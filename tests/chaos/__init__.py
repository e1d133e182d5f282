"""
Jobs, workers and everything that goes wrong, for some minutes; and then the books must balance.

    python -m tests.chaos --minutes 1 [--json] [--seed 7]

A private PostgreSQL server, producers some of whose transactions roll back, several workers, and faults at
random. Each run of a task is recorded by a connection of its own that no fault but the server's own death
touches: what stands there has happened, whatever the job's row says. When the time is over the faults end, the
workers get what they need to finish, and a verdict counts. It exits with 0 only if nothing was lost, nothing is
stuck, no effect came of what was rolled back, nothing happened twice that must happen once, and no worker ended
by itself. A *seed* repeats the choices, not the moments: what happens between processes is never the same again.

With ``--json`` the last line is one JSON object; without, it tells as it goes, and ends with a table.

Reading order: `kinds` (what is enqueued and what each kind promises), `tasks`, `effects`, `producers`, `server`,
`fleet` (the workers), `faults`, `verdict`, and `__main__`, which puts them together.
"""
