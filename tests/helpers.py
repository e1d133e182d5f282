"""Situations in one line each. Nothing clever."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

from django_pgqueue.models import Job
from django_pgqueue.outcomes import Claim
from django_pgqueue.statements.claim import ClaimedJob
from django_pgqueue.statements.enqueue import NewJob

PATIENCE_SECONDS = 30  # how long a test waits for an event before it fails


def new_job(**changes: Any) -> NewJob:
    values = {
        "backend": "default",
        "queue_name": "default",
        "task_path": "tests.app.tasks.add",
        "args": "[1, 2]",
        "kwargs": "{}",
        "priority": 0,
        "max_attempts": 5,
        "run_after": None,
    }
    return NewJob(**{**values, **changes})


def enqueue(**changes: Any) -> int:
    """Insert a pending job and return its id."""
    return Job.objects.enqueue(new_job(**changes)).id


def claim_one(owner: str = "worker", **options: Any) -> ClaimedJob:
    [job] = Job.objects.claim(owner, 1, **options)
    return job


def claim_of(job: ClaimedJob) -> Claim:
    return Claim(job.id, job.claim_version)


def expire_lease(job_id: int) -> None:
    """Let the lease of a running job have ended a second ago."""
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "UPDATE django_pgqueue_job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", [job_id]
        )


def make_due(job_id: int) -> None:
    """Let a pending job be available now."""
    with connections["default"].cursor() as cursor:
        cursor.execute("UPDATE django_pgqueue_job SET available_at = clock_timestamp() WHERE id = %s", [job_id])


def row(job_id: int, *columns: str) -> tuple:
    """Read some columns of a job as the database has them now."""
    return Job.objects.values_list(*columns).get(pk=job_id)


def wait_until(condition: Callable[[], Any], what: str = "") -> Any:
    """Return the first true answer of *condition*; fail after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_SECONDS} s in vain for {what or condition}")
        time.sleep(0.01)  # the only pause in the suite: between two looks at the database
    return answer


@contextmanager
def second_connection(alias: str = "default") -> Iterator[Any]:
    """A second real connection to the test database, in autocommit; whatever it holds ends with the block."""
    connection = connections[alias].copy()
    try:
        connection.ensure_connection()
        yield connection
    finally:
        if connection.connection is not None:
            connection.connection.close()


class InThread:
    """A call in a thread of its own: ``result()`` joins it, and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="second-actor")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the second actor still waits"
        if self._error is not None:
            raise self._error
        return self._value


def wait_for_lock_wait(connection: Any, process_id: int) -> None:
    """Return once the backend *process_id* waits for a lock; *connection* asks."""

    def waits() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", [process_id])
            answer = cursor.fetchone()
        return bool(answer and answer[0])

    wait_until(waits, f"backend {process_id} to wait for a lock")
