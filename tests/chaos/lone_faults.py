"""
The faults that `each` lets happen alone, one at a time. Each returns when it is over; a kill is over at once.

A fault happens to a `Stage`: workers on a steady stream of jobs. Its sentence says what is done, its number how many
workers there are.
"""

import itertools
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from . import server
from .faults import LOCK_TABLE_SQL
from .fleet import Fleet, Worker
from .kinds import LEASE_SECONDS
from .producers import Ledger, Producer
from .server import Server

if TYPE_CHECKING:
    from tests.proxy import Proxy  # which needs Django, once it is set up

CONNECTIONS = 80  # that the server takes at once
PATIENCE_SECONDS = 60.0  # for what must happen

TERMINATE_SQL = """
SELECT pg_terminate_backend(pid)
  FROM pg_stat_activity
 WHERE backend_type = 'client backend'
   AND application_name <> 'outside'
"""

OUTCOMES_SQL = """
SELECT count(*)
  FROM django_pgqueue_jobattempt AS attempt
  JOIN django_pgqueue_job AS job ON job.id = attempt.job_id
 WHERE job.args->>0 = %s
   AND attempt.outcome = %s
"""

RUNNING_SQL = "SELECT id FROM django_pgqueue_job WHERE status = 'running'"
RUNNING_SLOW_SQL = "SELECT id FROM django_pgqueue_job WHERE status = 'running' AND task_path LIKE '%.slow'"


class Stage:
    """Where a fault happens."""

    def __init__(self, server: Server, proxy: "Proxy", fleet: Fleet, ledger: Ledger, stream: Any) -> None:
        self.server = server
        self.proxy = proxy
        self.fleet = fleet
        self.stream = stream
        self._extra = Producer(1, 0, ledger)

    @property
    def worker(self) -> Worker:
        return self.fleet.working[0]

    @property
    def child(self) -> int:
        """The first worker's, once it is ready."""
        self.wait_until(lambda: self.worker.children)
        return self.worker.children[-1]

    def enqueue(self, kind: str) -> str:
        """Enqueue one more job; its token."""
        return self._extra.enqueue_one(kind)

    def wait_for_outcome(self, token: str, outcome: str, count: int = 1) -> None:
        self.wait_until(lambda: self.server.fetch(OUTCOMES_SQL, [token, outcome])[0][0] >= count)

    @staticmethod
    def wait_until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("What the fault waits for does not happen.")
            time.sleep(0.02)


class LoneFault(NamedTuple):
    does: str  # in words
    workers: int
    happen: Callable[[Stage], object]

    @property
    def kind(self) -> str:
        return self.happen.__name__


# ---- workers


def kill_child(stage: Stage) -> None:
    stage.worker.signal_child(stage.child, signal.SIGKILL)


def kill_supervisor(stage: Stage) -> None:
    stage.worker.is_ours_to_end = True
    stage.worker.signal_supervisor(signal.SIGKILL)


def kill_tree(stage: Stage) -> None:
    stage.worker.is_ours_to_end = True
    stage.worker.signal_all(signal.SIGKILL)


def kill_child_repeatedly(stage: Stage) -> None:
    for _ in range(10):
        if children := stage.worker.children:
            stage.worker.signal_child(children[-1], signal.SIGKILL)
        time.sleep(2)


def kill_tree_repeatedly(stage: Stage) -> None:
    """Of one of two, which is started again at once."""
    survivor = stage.fleet.working[1]
    for _ in range(10):
        for worker in stage.fleet.working:
            if worker is not survivor:
                worker.is_ours_to_end = True
                worker.signal_all(signal.SIGKILL)
        stage.fleet.tend()
        time.sleep(2)


def stop_child(stage: Stage) -> None:
    child = stage.child
    stage.worker.signal_child(child, signal.SIGSTOP)
    time.sleep(LEASE_SECONDS * 2)
    stage.worker.signal_child(child, signal.SIGCONT)


def stop_tree(stage: Stage) -> None:
    stage.worker.signal_all(signal.SIGSTOP)
    time.sleep(LEASE_SECONDS * 2)
    stage.worker.signal_all(signal.SIGCONT)


def deploy(stage: Stage) -> None:
    """Over when the old worker is gone; then a new one is started."""
    worker = stage.worker
    worker.is_ours_to_end = True
    worker.signal_supervisor(signal.SIGTERM)
    worker.process.wait(PATIENCE_SECONDS)
    stage.fleet.tend()


def deploy_over_long_jobs(stage: Stage) -> None:
    """With two that take longer than the grace period, in C code."""
    for _ in range(2):
        stage.enqueue("slow")
    stage.wait_until(lambda: len(stage.server.fetch(RUNNING_SLOW_SQL)) == 2)
    deploy(stage)


# ---- tasks


def segfault(stage: Stage) -> None:
    token = stage.enqueue("deadly")
    stage.wait_for_outcome(token, "crashed", 2)


def timeout_in_python(stage: Stage) -> None:
    stage.wait_for_outcome(stage.enqueue("overdue"), "timeout")


def timeout_in_sql(stage: Stage) -> None:
    stage.wait_for_outcome(stage.enqueue("overdue_in_sql"), "timeout")


def timeout_in_c(stage: Stage) -> None:
    stage.wait_for_outcome(stage.enqueue("overdue_in_c"), "timeout")


# ---- the database


def restart_fast(stage: Stage) -> None:
    stage.server.stop(server.FAST)
    stage.server.start()


def restart_immediately(stage: Stage) -> None:
    stage.server.stop(server.IMMEDIATE)
    stage.server.start()


def away(stage: Stage) -> None:
    stage.server.stop(server.FAST)
    time.sleep(15)
    stage.server.start()


def terminate_backends(stage: Stage) -> None:
    stage.server.fetch(TERMINATE_SQL)


def terminate_idle_backends(stage: Stage) -> None:
    """After a while without jobs."""
    stage.stream.is_held_back = True
    stage.wait_until(lambda: not stage.server.fetch(RUNNING_SQL))
    time.sleep(2)
    stage.server.fetch(TERMINATE_SQL)
    stage.stream.is_held_back = False


def terminate_backends_repeatedly(stage: Stage) -> None:
    for _ in range(10):
        stage.server.fetch(TERMINATE_SQL)
        time.sleep(1)


def no_free_connections(stage: Stage) -> None:
    """Whoever had one, the worker included, has lost it."""
    end = time.monotonic() + 10
    with ExitStack() as taken:
        killer = taken.enter_context(stage.server.connect())
        for number in itertools.count():
            try:
                taken.enter_context(stage.server.connect())
            except psycopg.OperationalError:
                killer.execute(TERMINATE_SQL)
                time.sleep(0.02)
            if time.monotonic() > end:
                assert number > 10
                return


def read_only(stage: Stage) -> None:
    stage.server.fetch("ALTER SYSTEM SET default_transaction_read_only = on")
    stage.server.fetch("SELECT pg_reload_conf()")
    time.sleep(10)
    stage.server.fetch("ALTER SYSTEM RESET default_transaction_read_only")
    stage.server.fetch("SELECT pg_reload_conf()")


def lock_table(stage: Stage) -> None:
    with stage.server.connect() as connection:
        connection.execute("BEGIN; SET LOCAL lock_timeout = '5s'")
        connection.execute(LOCK_TABLE_SQL)
        time.sleep(5)


# ---- the network


def half_open(stage: Stage) -> None:
    stage.proxy.go_deaf()
    time.sleep(20)
    stage.proxy.forward()
    stage.proxy.release_deaf()


def forgotten_connections(stage: Stage) -> None:
    """As after the restart of a firewall: new ones work."""
    stage.proxy.go_deaf(new=False)
    time.sleep(20)
    stage.proxy.release_deaf()


def lose_answers_of_claims(stage: Stage) -> None:
    _lose_answers(stage, r"SET status = 'running'")


def lose_answers_of_endings(stage: Stage) -> None:
    _lose_answers(stage, r"SET status = 'done'")


def _lose_answers(stage: Stage, pattern: str) -> None:
    for _ in range(5):
        stage.proxy.lose_commit_answer(pattern).wait(PATIENCE_SECONDS)
        time.sleep(0.3)


FAULTS = {
    fault.kind: fault
    for fault in (
        LoneFault("kill -9 of the only child", 1, kill_child),
        LoneFault("kill -9 of the only child every 2 s, for 20 s", 1, kill_child_repeatedly),
        LoneFault("kill -9 of the supervisor of one of two workers", 2, kill_supervisor),
        LoneFault("kill -9 of the whole tree of one of two workers", 2, kill_tree),
        LoneFault("the same every 2 s for 20 s, started again each time", 2, kill_tree_repeatedly),
        LoneFault("SIGSTOP of a child for two leases", 2, stop_child),
        LoneFault("SIGSTOP of a whole tree for two leases", 2, stop_tree),
        LoneFault("SIGTERM, wait for the end, start the next", 1, deploy),
        LoneFault("the same with jobs that outlast the grace period", 1, deploy_over_long_jobs),
        LoneFault("a job that segfaults, twice", 1, segfault),
        LoneFault("a task over its timeout of 2 s, in Python", 1, timeout_in_python),
        LoneFault("the same in a statement", 1, timeout_in_sql),
        LoneFault("the same in C code", 1, timeout_in_c),
        LoneFault("database restart, fast", 1, restart_fast),
        LoneFault("database restart, immediate", 1, restart_immediately),
        LoneFault("database away for 15 s", 1, away),
        LoneFault("all backends terminated, busy", 1, terminate_backends),
        LoneFault("all backends terminated, idle", 1, terminate_idle_backends),
        LoneFault("all backends terminated each second, for 10 s", 1, terminate_backends_repeatedly),
        LoneFault("no free connections for 10 s", 1, no_free_connections),
        LoneFault("read-only for 10 s", 1, read_only),
        LoneFault("the jobs' table locked for 5 s", 1, lock_table),
        LoneFault("the network swallows everything for 20 s", 1, half_open),
        LoneFault("the network has forgotten what was open", 1, forgotten_connections),
        LoneFault("five claims whose COMMIT is not answered", 1, lose_answers_of_claims),
        LoneFault("five endings whose COMMIT is not answered", 1, lose_answers_of_endings),
    )
}
