"""
Run jobs in a test, in the test's own transaction.

    def test_an_order_is_confirmed(self):
        place_order(...)
        [receipt] = run_jobs()
        self.assertEqual(receipt.status, TaskResultStatus.SUCCESSFUL)
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from django.db import connections, transaction
from psycopg.pq import TransactionStatus

from .backend import PgQueueBackend
from .compat import Task, TaskResult, task_backends
from .outcomes import Claim, Succeeded
from .statements.claim import earlier_attempts, sweep
from .worker import attempt

OWNER = "run_jobs"


def run_jobs(
    *, queue_names: Sequence[str] | None = None, backend: str = "default", limit: int = 1_000
) -> list[TaskResult]:
    """
    Run the jobs that are due, one by one, until none is left, and return the result of each attempt.

    As a worker would: highest priority first, jobs enqueued by jobs included; a job that failed waits
    for its backoff and is not run again. *queue_names* restricts it to these queues. Everything happens
    on the caller's connection, so it works inside ``TestCase`` and rolls back with it. An exception in a
    task is recorded, not raised: look at ``status`` and ``errors``.

    Raises ``RuntimeError`` after *limit* attempts, since jobs may enqueue each other for ever.
    """
    chosen = task_backends[backend]
    if not isinstance(chosen, PgQueueBackend):
        raise TypeError(f"run_jobs() needs a PgQueueBackend; TASKS[{backend!r}] is {type(chosen).__name__}.")
    ran: list[TaskResult] = []
    while jobs := chosen.jobs.claim(OWNER, 1, queue_names=_names(queue_names, chosen), lease_seconds=3_600):
        [job] = jobs
        if len(ran) == limit:
            chosen.jobs.release([Claim(job.id, job.claim_version)])
            raise RuntimeError(f"run_jobs() has run {limit} jobs and there are more. Do they enqueue each other?")
        earlier = earlier_attempts(connections[chosen.database], [job]).get(job.id, ())
        attempted = attempt.run(job, chosen.settings.backoff, earlier, _InTest(chosen.database))
        settlement = chosen.jobs.settle([attempted.outcome])
        for written in settlement.settled:
            attempt.log(attempted, written)
            attempt.announce(attempted, written)
        ran.append(chosen.get_result(str(job.id)))
    return ran


def _names(queue_names: Sequence[str] | None, backend: PgQueueBackend) -> Sequence[str] | None:
    """The queues to serve, ``None`` for all: unless they are named, those with jobs that no other backend has."""
    if queue_names is None and (foreign := backend.foreign_queues()):
        return sorted({band.queue_name for band in sweep(connections[backend.database])} - foreign)
    return queue_names


class _InTest(attempt.Surroundings):
    """The caller's transaction on *database*."""

    def __init__(self, database: str) -> None:
        self._database = database

    def call(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return _call_in_savepoint(task, args, kwargs)

    def atomically(self, perform: Callable[[], Succeeded]) -> Succeeded:
        """As in a worker, but that its end is written afterwards: nothing can come between, here."""
        with transaction.atomic(using=self._database):
            return perform()


def _call_in_savepoint(task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """
    Call *task* so that a database error in it does not break the transaction of the test.

    A worker runs tasks in autocommit, where what came before an error stays. So a savepoint is rolled
    back only when its transaction is broken.
    """
    held = [connection for connection in connections.all(initialized_only=True) if connection.in_atomic_block]
    caught: BaseException | None = None
    value = None
    with ExitStack() as savepoints:
        for connection in held:
            savepoint = transaction.atomic(using=connection.alias)
            # Where TestCase holds the transaction, a task may ask for the outermost block, as in a worker.
            savepoint._from_testcase = connection.atomic_blocks[-1]._from_testcase  # type: ignore[attr-defined]
            savepoints.enter_context(savepoint)
        try:
            value = task.call(*args, **kwargs)
        except BaseException as error:
            caught = error
        for connection in held:
            if _is_broken(connection):
                transaction.set_rollback(True, using=connection.alias)
    if caught is not None:
        raise caught
    return value


def _is_broken(connection: Any) -> bool:
    raw = connection.connection
    return connection.needs_rollback or (raw is not None and raw.info.transaction_status == TransactionStatus.INERROR)
