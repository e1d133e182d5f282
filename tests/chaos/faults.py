"""
The faults. Each is a function that does it, and returns what it has done in words.

What lasts for a while is put to an end later, while other faults happen: `Faults.later`.
"""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg

from . import server
from .fleet import Fleet, Worker
from .kinds import LEASE_SECONDS
from .server import Server

if TYPE_CHECKING:
    from tests.proxy import Proxy  # which needs Django, once it is set up

TERMINATE_SQL = """
SELECT pg_terminate_backend(pid)
  FROM pg_stat_activity
 WHERE backend_type = 'client backend'
   AND application_name <> 'outside'
   AND random() < %s
"""

LOCK_ROWS_SQL = """
SELECT id FROM django_pgqueue_job WHERE status IN ('pending', 'running') AND random() < 0.3 FOR UPDATE SKIP LOCKED
"""

# Statements whose transaction's COMMIT is to be answered to nobody: claims, endings, effects, enqueues, anything.
ANSWERS = (
    r"SET status = 'running'",
    r"SET status = 'done'",
    r"UPDATE django_pgqueue_job",
    r"INSERT INTO chaos_once",
    r"INSERT INTO django_pgqueue_job|EXECUTE django_pgqueue_insert",
    r"SELECT|INSERT|UPDATE",
)

LOCK_TABLE_SQL = "LOCK TABLE django_pgqueue_job IN ACCESS EXCLUSIVE MODE"


class Faults:
    """Does one after the other, at random, and counts them by kind."""

    def __init__(self, seed: int, server: Server, proxy: "Proxy", fleet: Fleet, say: Callable[[str], None]) -> None:
        self._random = random.Random(f"{seed} faults")
        self._server = server
        self._proxy = proxy
        self._fleet = fleet
        self._say = say
        self._later: list[tuple[float, str, Callable[[], object]]] = []
        self.counts: Counter[str] = Counter()
        self._choices = {
            self._kill_child: 6,
            self._kill_tree: 3,
            self._kill_supervisor: 2,
            self._stop_child: 4,
            self._stop_tree: 3,
            self._stop_supervisor: 2,
            self._deploy: 3,
            self._force: 1,
            self._terminate_backends: 6,
            self._restart_fast: 2,
            self._restart_immediately: 2,
            self._lock_rows: 3,
            self._lock_table: 2,
            self._go_deaf: 3,
            self._forget_connections: 3,
            self._reset_connections: 2,
            self._refuse_connections: 2,
            self._lose_commit_answers: 6,
        }

    def happen(self) -> None:
        """Let one fault happen."""
        [fault] = self._random.choices([*self._choices], [*self._choices.values()])
        done = fault()
        if done:
            self.counts[fault.__name__.strip("_")] += 1
            self._say(done)

    def end(self) -> None:
        """Put an end to everything that lasts."""
        self.pass_time(float("inf"))
        self._proxy.forget_traps()
        self._hear_again()

    def pass_time(self, until: float) -> None:
        """Put an end to what should not last beyond the moment *until*."""
        due = [entry for entry in self._later if entry[0] <= until]
        for entry in due:
            self._later.remove(entry)
            _, words, end = entry
            end()
            self._say(words)

    def _after(self, seconds: float, words: str, end: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + seconds, words, end))

    # ---- workers

    def _kill_child(self) -> str | None:
        worker, pid = self._child()
        if worker is None:
            return None
        worker.signal_child(pid, signal.SIGKILL)
        return f"kill -9 of child {pid} of {worker}"

    def _kill_tree(self) -> str | None:
        worker = self._worker()
        if worker is None:
            return None
        worker.is_ours_to_end = True
        worker.signal_all(signal.SIGKILL)
        return f"kill -9 of the whole tree of {worker}"

    def _kill_supervisor(self) -> str | None:
        worker = self._worker()
        if worker is None:
            return None
        worker.is_ours_to_end = True
        worker.signal_supervisor(signal.SIGKILL)
        return f"kill -9 of the supervisor of {worker}"

    def _stop_child(self) -> str | None:
        worker, pid = self._child()
        if worker is None:
            return None
        worker.signal_child(pid, signal.SIGSTOP)
        self._after(
            self._longer_than_a_lease(), f"child {pid} goes on", lambda: worker.signal_child(pid, signal.SIGCONT)
        )
        return f"child {pid} of {worker} is stopped"

    def _stop_tree(self) -> str | None:
        worker = self._worker()
        if worker is None:
            return None
        worker.signal_all(signal.SIGSTOP)
        self._after(self._longer_than_a_lease(), f"{worker} goes on", lambda: worker.signal_all(signal.SIGCONT))
        return f"the whole tree of {worker} is stopped"

    def _stop_supervisor(self) -> str | None:
        worker = self._worker()
        if worker is None:
            return None
        worker.signal_supervisor(signal.SIGSTOP)
        self._after(
            self._longer_than_a_lease(),
            f"the supervisor of {worker} goes on",
            lambda: worker.signal_supervisor(signal.SIGCONT),
        )
        return f"the supervisor of {worker} is stopped"

    def _deploy(self) -> str | None:
        worker = self._worker()
        if worker is None:
            return None
        worker.is_ours_to_end = True
        worker.signal_supervisor(signal.SIGTERM)
        return f"deploy: SIGTERM to {worker}"

    def _force(self) -> str | None:
        worker = self._worker()
        if worker is None:
            return None
        worker.is_ours_to_end = True
        worker.signal_supervisor(signal.SIGTERM)
        self._after(
            self._random.uniform(0, 1), f"a second signal to {worker}", lambda: worker.signal_supervisor(signal.SIGINT)
        )
        return f"SIGTERM to {worker}, by someone without patience"

    def _worker(self) -> Worker | None:
        workers = [worker for worker in self._fleet.working if worker.is_ready and not worker.is_ours_to_end]
        return self._random.choice(workers) if workers else None

    def _child(self) -> tuple[Worker, int] | tuple[None, None]:
        worker = self._worker()
        children = worker.children if worker is not None else []
        return (worker, self._random.choice(children)) if children else (None, None)

    def _longer_than_a_lease(self) -> float:
        return LEASE_SECONDS * self._random.uniform(1.2, 2.5)

    # ---- the database

    def _terminate_backends(self) -> str:
        share = self._random.choice((0.1, 0.3, 1.0))
        ended = len(self._server.fetch(TERMINATE_SQL, [share]))
        return f"{ended} backends are terminated"

    def _restart_fast(self) -> str:
        return self._restart(server.FAST, "fast")

    def _restart_immediately(self) -> str:
        return self._restart(server.IMMEDIATE, "immediate")

    def _restart(self, how: signal.Signals, name: str) -> str:
        self._server.stop(how)
        away = self._random.choice((0.0, 0.5, 3.0))
        time.sleep(away)
        self._server.start()
        return f"the database was restarted ({name}), and away for {away:g} s"

    def _lock_rows(self) -> str | None:
        rows = self._hold(LOCK_ROWS_SQL, self._random.uniform(0.5, 4), "the locked rows are let go")
        return None if rows is None else f"{rows} rows are locked by someone else"

    def _lock_table(self) -> str | None:
        held = self._hold(LOCK_TABLE_SQL, self._random.uniform(1, LEASE_SECONDS), "the jobs' table is let go")
        return None if held is None else "the jobs' table is locked by someone else"

    def _hold(self, statement: str, seconds: float, words: str) -> int | None:
        """Keep the locks that *statement* takes for a while; how many rows it found, ``None`` if it got none."""
        connection = self._server.connect()
        try:
            connection.execute("BEGIN; SET LOCAL lock_timeout = '5s'")  # a busy table is not free at once
            rows = connection.execute(statement).rowcount
        except psycopg.errors.LockNotAvailable:
            connection.close()
            return None
        self._after(seconds, words, connection.close)
        return rows

    # ---- the network

    def _go_deaf(self) -> str:
        self._proxy.go_deaf()
        self._after(self._longer_than_a_lease() / 2, "the network delivers again", self._hear_again)
        return "the network swallows everything"

    def _forget_connections(self) -> str:
        self._proxy.go_deaf(new=False)
        self._after(self._longer_than_a_lease(), "hosts hear that their connections are gone", self._proxy.release_deaf)
        return "the network has forgotten all connections, and tells nobody"

    def _hear_again(self) -> None:
        self._proxy.forward()
        self._proxy.release_deaf()

    def _reset_connections(self) -> str:
        self._proxy.reset()
        return "all connections are reset"

    def _refuse_connections(self) -> str:
        self._proxy.refuse()
        self._after(self._random.uniform(0.5, LEASE_SECONDS), "connections are taken again", self._proxy.forward)
        return "all connections are reset, and new ones refused"

    def _lose_commit_answers(self) -> str:
        pattern = self._random.choice(ANSWERS)
        silently = self._random.random() < 0.3
        count = self._random.randint(1, 3)
        for _ in range(count):
            self._proxy.lose_commit_answer(pattern, silently=silently)
        if silently:
            self._after(
                self._longer_than_a_lease(), "hosts hear that their connections are gone", self._proxy.release_deaf
            )
        return f"{count} COMMITs will get no answer{', nor an end' if silently else ''}: {pattern}"
