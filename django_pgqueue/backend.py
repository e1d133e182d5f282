"""
The door from Django's Tasks framework: ``"BACKEND": "django_pgqueue.PgQueueBackend"``.

Imported while apps are loading, since ``@task`` instantiates the backend, so it looks the model up late.
Django keeps one instance for each thread, and makes others when settings change: nothing belongs here but what
can be found out again.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.core.checks import CheckMessage
from django.db import connections, router

from . import payload, registry, results
from .compat import BaseTaskBackend, Task, TaskResultDoesNotExist, is_heard, task_backends, task_enqueued
from .conf import MAX_JOB_KEY_LENGTH, MAX_QUEUE_NAME_LENGTH, MAX_TASK_PATH_LENGTH, Options, is_job_key, is_queue_name
from .statements.claim import EarlierAttempt
from .statements.enqueue import NewJob, insert_job
from .states import Status
from .tasks import InvalidTaskOption, JobResult
from .tasks import Task as OurTask

if TYPE_CHECKING:
    from .managers import JobManager
    from .models import Job

MAX_ID = 2**63 - 1
MAX_VALID = 1_000  # tasks of which a backend knows that they are


class PgQueueBackend(BaseTaskBackend):
    """Keeps jobs in PostgreSQL, in the transaction of whoever enqueues them."""

    task_class = OurTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    checks_calls = True  # so that Task.enqueue() need not

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._valid: dict[int, Task] = {}  # by id()
        if isinstance(given := params.get("QUEUES"), str):
            self.queues = {given}  # the one queue that it names, not its letters

    @cached_property
    def settings(self) -> Options:
        """The checked options; raises ``ImproperlyConfigured``. Not at once, so that checks can report."""
        return Options.parse(self.alias, self.options)

    @property
    def database(self) -> str:
        """The alias of the database that holds this backend's jobs."""
        return self.settings.database or router.db_for_write(self._job)

    @property
    def jobs(self) -> "JobManager":
        """The manager of jobs, bound to this backend's database."""
        return self._job.objects.db_manager(self.database)

    @cached_property
    def _job(self) -> "type[Job]":
        from .models import Job

        return Job

    def foreign_queues(self) -> set[str]:
        """The queues of other backends whose jobs stand in the same database: workers of this one leave them."""
        return {
            name
            for other in task_backends.all()
            if isinstance(other, PgQueueBackend) and other.alias != self.alias and other.database == self.database
            for name in other.queues
        }

    def validate_task(self, task: Task) -> None:
        super().validate_task(task)
        if not is_queue_name(task.queue_name):
            raise InvalidTaskOption(
                f"A queue's name must have 1 to {MAX_QUEUE_NAME_LENGTH} characters, not {task.queue_name!r:.80}."
            )
        if len(task.module_path) > MAX_TASK_PATH_LENGTH:
            raise InvalidTaskOption(
                f"A task's path may have at most {MAX_TASK_PATH_LENGTH} characters: {task.module_path:.80}…"
            )

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> JobResult:
        """
        Insert a job in the transaction that is open on this backend's database, and return its result.

        See `Task.enqueue`. Sends ``task_enqueued`` for a job that was made.
        """
        self._check(task)
        job = self._new_job(task, *payload.encode_call(task.func, task.takes_context, args, kwargs))
        inserted = insert_job(connections[self.database], job, self.settings.notify)
        if not inserted.is_new:
            return self._read_result(inserted.id, created=False)
        result = results.of_new_job(task, self.alias, inserted.id, inserted.created_at, args, kwargs)
        if is_heard(task_enqueued, logging.DEBUG):
            task_enqueued.send(type(self), task_result=result)
        return result

    def enqueue_many(self, task: Task, calls: Iterable[Any], job_keys: Iterable[str | None] | None = None) -> list[int]:
        """See `Task.enqueue_many`."""
        self._check(task)
        encoded = [self._encode(task, call, place) for place, call in enumerate(calls)]
        if not encoded:
            return []
        keys = None if job_keys is None else self._keys(job_keys, len(encoded))
        if keys is None and getattr(task, "job_key", None) is not None:
            raise ValueError("One job_key for many jobs would make one job: pass job_keys, one for each call.")
        return self.jobs.enqueue_many(self._new_job(task, "[]", "{}"), encoded, keys, self.settings.notify)

    def get_result(self, result_id: str) -> JobResult:
        """Return the result of the job *result_id* as it stands now; raises ``TaskResultDoesNotExist``."""
        return self._read_result(_job_id(result_id))

    def _read_result(self, job_id: int, *, created: bool = True) -> JobResult:
        from .models import JobAttempt

        try:
            job = self._job.objects.using(self.database).get(pk=job_id, backend=self.alias)
        except self._job.DoesNotExist:
            raise TaskResultDoesNotExist(str(job_id)) from None
        # The job may have gone on since: only the attempts before the version that was read belong to it, and
        # that version's own if it was not running then.
        version = job.claim_version - (job.status in (Status.RUNNING, Status.DONE))
        earlier = JobAttempt.objects.using(self.database).filter(
            job_id=job_id, counted=True, claim_version__lte=version
        )
        rows = earlier.order_by("claim_version").values_list("worker", "error_class", "traceback")
        attempts = [EarlierAttempt(*row) for row in rows] if job.attempts else []
        return results.of_row(job, attempts, created=created)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        from . import checks

        return [*super().check(**kwargs), *checks.check_backend(self)]

    def _check(self, task: Task) -> None:
        """Raise ``InvalidTask`` unless *task* is valid; once is enough, since neither it nor the settings change."""
        if self._valid.get(id(task)) is not task:
            self.validate_task(task)
            if len(self._valid) == MAX_VALID:
                self._valid.clear()
            self._valid[id(task)] = task

    def _new_job(self, task: Task, args: str, kwargs: str) -> NewJob:
        registry.check_reachable(task)
        return NewJob(
            backend=self.alias,
            queue_name=task.queue_name,
            task_path=task.module_path,
            args=args,
            kwargs=kwargs,
            priority=task.priority,
            max_attempts=getattr(task, "max_attempts", None) or self.settings.max_attempts,
            run_after=task.run_after,
            job_key=getattr(task, "job_key", None),
        )

    def _keys(self, job_keys: Iterable[str | None], count: int) -> list[str | None]:
        """Return the key of each call; raises ``ValueError`` for keys that cannot be."""
        keys = list(job_keys)
        if len(keys) != count:
            raise ValueError(f"There are {count} calls and {len(keys)} job_keys.")
        for place, key in enumerate(keys):
            if key is not None and not is_job_key(key):
                raise ValueError(f"Key {place} must be text of 1 to {MAX_JOB_KEY_LENGTH} characters, not {key!r:.80}.")
        return keys

    def _encode(self, task: Task, call: Any, place: int) -> tuple[str, str]:
        args: Sequence[Any] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(call, dict):
            kwargs = call
        elif isinstance(call, list | tuple):
            args = call
        else:
            raise TypeError(
                f"Call {place} must be a list or tuple of arguments, or a dictionary of keyword ones, not {call!r:.80}."
            )
        try:
            return payload.encode_call(task.func, task.takes_context, args, kwargs)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError  # a subclass may want more than a text
            raise kind(f"Call {place}: {error}") from None


def _job_id(result_id: object) -> int:
    """Return the id that *result_id* writes; raises ``TaskResultDoesNotExist`` for what no id looks like."""
    text = str(result_id)
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= MAX_ID:
        return int(text)
    raise TaskResultDoesNotExist(result_id)
