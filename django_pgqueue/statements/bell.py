"""
Ring for workers that sleep, and only for those.

PostgreSQL makes all transactions that notify commit one after the other, so that a notification for every
enqueue would be paid by everyone who commits. A worker that is about to sleep therefore holds a session's
advisory lock, exclusive; who makes jobs pending tries the same lock *shared, for the transaction*, in the
statement that does so, and notifies where the try fails. Who got it holds it to the end of the transaction:
nobody falls asleep while jobs are in flight of which nobody was told. Who falls asleep looks for jobs
once more when the lock is there, and then all that is missed would have rung.

Locks have two numbers: the OID of the jobs' table as the `search_path` finds it, so that queues in other
schemas are other locks, and a place below. One lock for each of 64 groups of queues, and one for all
workers that wait for jobs of more queues than they can name.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from .database import CHANNEL, Connection, execute, fetch

HANDOVER_CHANNEL = "django_pgqueue_handover"  # and these nothing: whoever rests may try the locks
FIRST_LEAD_KEY = 1_000  # from here on, those of the leaders
ANY_KEY = 64  # of workers of all queues, of all but some, or of many

TABLE = "'django_pgqueue_job'::regclass::oid::int"
KEY = "hashtext(queue_name) & 63"

# Of a row with *queue_name* and *available_at*. A worker that sleeps looks by itself before anything becomes due
# that is further away. One group's lock is enough to know that someone sleeps, and then the other is not needed.
RING_IF_ASLEEP = f"""
CASE WHEN available_at < clock_timestamp() + interval '60 s'
      AND NOT (pg_try_advisory_xact_lock_shared({TABLE}, {KEY})
               AND pg_try_advisory_xact_lock_shared({TABLE}, {ANY_KEY}))
     THEN pg_notify('{CHANNEL}', queue_name) END
"""


def ring_for(name: str) -> str:
    """Return a query that rings once for each queue of *name*, a CTE of changed rows; NULL is never due."""
    return f"""
    SELECT {RING_IF_ASLEEP}
      FROM (SELECT queue_name, min(available_at) AS available_at FROM {name} GROUP BY queue_name) AS changed
"""


# The same where the option NOTIFY is at hand.
RING = f"""
CASE WHEN %(notify)s::text <> 'never'
      AND available_at < clock_timestamp() + interval '60 s'
      AND (%(notify)s::text = 'always'
           OR NOT (pg_try_advisory_xact_lock_shared({TABLE}, {KEY})
                   AND pg_try_advisory_xact_lock_shared({TABLE}, {ANY_KEY})))
     THEN pg_notify('{CHANNEL}', queue_name) END
"""

KEYS_SQL = f"""
SELECT DISTINCT {KEY} AS key
  FROM unnest(%(queue_names)s::text[]) AS queue_name
 ORDER BY key
"""

# A lock that nobody else has exclusive, and that cannot be had, is held by enqueues in flight.
TRY_SQL = f"""
WITH lead AS MATERIALIZED (
    SELECT %(leads)s::bool OR pg_try_advisory_lock({TABLE}, %(lead_key)s::int) AS is_ours
)
SELECT is_ours, key,
       CASE WHEN NOT is_ours THEN 'theirs'
            WHEN pg_try_advisory_lock({TABLE}, key) THEN 'ours'
            WHEN pg_try_advisory_xact_lock_shared({TABLE}, key) THEN 'in flight'
            ELSE 'theirs' END
  FROM lead, unnest(%(keys)s::int[]) AS key
"""

WAIT_SQL = f"SELECT pg_advisory_lock({TABLE}, {{key}})"

# In this order: who hears of it finds the locks free.
LET_GO_SQL = """
SELECT pg_advisory_unlock_all(), CASE WHEN %(hand_over)s::bool THEN pg_notify(%(channel)s, '') END
"""

# A server that hears nothing of a client waits for hours by itself, and so long the locks would stay.
KEEPALIVE_SQL = """
SET tcp_keepalives_idle = 10;
SET tcp_keepalives_interval = 5;
SET tcp_keepalives_count = 3;
SET tcp_user_timeout = 30000
"""

IDENTITY_SQL = """
SELECT pid, backend_start
  FROM pg_stat_activity
 WHERE pid = pg_backend_pid()
"""

END_SQL = """
SELECT pg_terminate_backend(pid, 1000)
  FROM pg_stat_activity
 WHERE pid = %(pid)s
   AND backend_start = %(backend_start)s
"""


class Tried(NamedTuple):
    """*leads*: the leader's lock is ours. Of the others, *ours* are, and of *in_flight* nobody but enqueues has one."""

    leads: bool
    ours: set[int]
    in_flight: list[int]


def keys_of(connection: Connection, queue_names: Sequence[str]) -> list[int]:
    """Return the places of the locks of *queue_names*, ascending."""
    return [key for (key,) in fetch(connection, KEYS_SQL, {"queue_names": list(queue_names)})]


def prepare(connection: Connection) -> tuple[int, datetime]:
    """Let the server notice soon when this client is gone; return what identifies the session."""
    execute(connection, KEEPALIVE_SQL)
    [(pid, backend_start)] = fetch(connection, IDENTITY_SQL, {})
    return pid, backend_start


def end_session(connection: Connection, session: tuple[int, datetime]) -> None:
    """End a session that `prepare` has identified, with its locks, if the server still has it."""
    pid, backend_start = session
    fetch(connection, END_SQL, {"pid": pid, "backend_start": backend_start})


def try_locks(connection: Connection, leads: bool, lead_key: int, keys: Sequence[int]) -> Tried:
    """
    Try the locks at *keys*, for the session, if the one at *lead_key* is ours: it *leads* already, or gets it now.

    A lock that the session has already would have to be let go of twice.
    """
    rows = fetch(connection, TRY_SQL, {"leads": leads, "lead_key": lead_key, "keys": list(keys)})
    return Tried(
        leads=any(is_ours for is_ours, _, _ in rows),
        ours={key for _, key, state in rows if state == "ours"},
        in_flight=[key for _, key, state in rows if state == "in flight"],
    )


def let_go(connection: Connection, *, hand_over: bool) -> None:
    """Let go of all locks of the session, and if there is something to *hand over* tell those who wait for them."""
    fetch(connection, LET_GO_SQL, {"hand_over": hand_over, "channel": HANDOVER_CHANNEL})
