"""
From rows to Django's TaskResult.

Reading never checks routing again: a row may name a queue that has been removed since, or a task that has
been deleted, and its result can still be read. A requeued job starts afresh, so ``worker_ids`` and
``errors`` are those of the counted attempts since then; the admin shows all.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.utils import timezone

from . import payload, registry
from .compat import Task as DjangoTask
from .compat import TaskError, TaskResult, TaskResultStatus
from .conf import uses_time_zones
from .outcomes import ErrorRecord
from .statements.claim import ClaimedJob, EarlierAttempt
from .states import RESULT_STATUS, Status
from .tasks import JobResult, rerouted

if TYPE_CHECKING:
    from .models import Job


# For moments that have no datetime. A day from the end of the calendar, so that every time zone has them.
EARLIEST, LATEST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
_CALENDAR = EARLIEST.timestamp(), LATEST.timestamp()


def of_new_job(
    task: DjangoTask, backend: str, job_id: int, created_at: datetime, args: Sequence[Any], kwargs: dict[str, Any]
) -> JobResult:
    """Return the result of a job just enqueued."""
    return JobResult(
        task=task,
        id=str(job_id),
        status=TaskResultStatus.READY,
        enqueued_at=created_at,
        started_at=None,
        last_attempted_at=None,
        finished_at=None,
        args=list(args),
        kwargs=dict(kwargs),
        backend=backend,
        errors=[],
        worker_ids=[],
    )


def of_row(job: "Job", earlier: Sequence[EarlierAttempt], *, created: bool = True) -> JobResult:
    """
    Return the result of *job* as it stands; *earlier* are all its counted failed attempts, oldest first.

    *created* is False for an enqueue that found this job instead of making one.
    """
    status = Status(job.status)
    # The attempt that runs, or that succeeded, has no row of its own.
    unrecorded = [job.claimed_by or ""] if status in (Status.RUNNING, Status.DONE) and job.attempts else []
    recent = _most_recent(earlier, job.attempts - len(unrecorded))
    args, kwargs = _readable_call(job)
    result = JobResult(
        task=rerouted(
            _task_at(job.task_path),
            backend=job.backend,
            priority=job.priority,
            queue_name=job.queue_name,
            run_after=job.available_at if job.attempts == 0 and job.available_at > job.created_at else None,
        ),
        id=str(job.pk),
        status=RESULT_STATUS[status],
        enqueued_at=job.created_at,
        started_at=job.started_at,
        last_attempted_at=job.claimed_at if job.attempts else None,
        finished_at=job.finished_at,
        args=args,
        kwargs=kwargs,
        backend=job.backend,
        errors=_errors(recent),
        worker_ids=[attempt.worker for attempt in recent] + unrecorded,
        created=created,
    )
    if status == Status.DONE:
        object.__setattr__(result, "_return_value", job.return_value)  # no constructor argument sets it
    return result


def of_claim(
    job: ClaimedJob, task: DjangoTask, args: list[Any], kwargs: dict[str, Any], earlier: Sequence[EarlierAttempt]
) -> JobResult:
    """Return the result that one attempt of a claimed *job* carries, from its start to its end."""
    recent = _most_recent(earlier, job.attempts - 1)
    return JobResult(
        task=rerouted(task, backend=job.backend, priority=job.priority, queue_name=job.queue_name, run_after=None),
        id=str(job.id),
        status=TaskResultStatus.RUNNING,
        enqueued_at=_moment(job.created_at),
        started_at=_moment(job.started_at),
        last_attempted_at=_moment(job.claimed_at),
        finished_at=None,
        args=args,
        kwargs=kwargs,
        backend=job.backend,
        errors=_errors(recent),
        worker_ids=[*(attempt.worker for attempt in recent), job.claimed_by],
    )


def finish(result: TaskResult, error: ErrorRecord | None, return_value: str | None = None) -> None:
    """Turn the result of an attempt into that of a finished job. Django gives it no other way than this."""
    object.__setattr__(result, "finished_at", timezone.now())
    if error is None:
        object.__setattr__(result, "status", TaskResultStatus.SUCCESSFUL)
        object.__setattr__(result, "_return_value", None if return_value is None else json.loads(return_value))
    else:
        object.__setattr__(result, "status", TaskResultStatus.FAILED)
        result.errors.append(TaskError(exception_class_path=error.class_path, traceback=error.traceback))


def _readable_call(job: "Job") -> tuple[list[Any], dict[str, Any]]:
    """The arguments of *job*, none if it was spoilt by hand: its result can still be read."""
    try:
        return payload.checked_call(job.args, job.kwargs)
    except ValueError:
        return [], {}


def _task_at(task_path: str) -> DjangoTask:
    try:
        return registry.find(task_path)
    except registry.UnknownTask:
        return _missing_task(task_path)


def _missing_task(task_path: str) -> DjangoTask:
    """Return a stand-in for a task whose code is gone: it has the path, and cannot be called."""

    def missing(*args: Any, **kwargs: Any) -> None:
        raise registry.UnknownTask(f"There is no task {task_path!r} any more.")

    missing.__module__, _, missing.__name__ = task_path.rpartition(".")
    missing.__qualname__ = missing.__name__
    task = object.__new__(DjangoTask)  # not through __init__, which would check a function that is not there
    defaults = {"func": missing, "takes_context": False}
    for field in fields(DjangoTask):
        object.__setattr__(task, field.name, defaults.get(field.name))
    return task


def _most_recent(earlier: Sequence[EarlierAttempt], count: int) -> Sequence[EarlierAttempt]:
    return earlier[-count:] if count > 0 else []


def _errors(attempts: Sequence[EarlierAttempt]) -> list[TaskError]:
    return [TaskError(exception_class_path=attempt.error_class, traceback=attempt.traceback) for attempt in attempts]


def _moment(seconds: float) -> datetime:
    """The datetime, as the project uses them, of *seconds* since 1970, or the nearest there is."""
    if _CALENDAR[0] < seconds < _CALENDAR[1]:
        moment = datetime.fromtimestamp(seconds, UTC)
    else:  # set by hand: PostgreSQL knows the infinite, and years of six digits
        moment = EARLIEST if seconds < 0 else LATEST
    return moment if uses_time_zones() else timezone.make_naive(moment)
