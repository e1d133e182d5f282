"""
Tasks as users write them: ``@task``, the Task that it makes, and the Context that a task may take.

A Task is Django's, with three more settings. The decorator always builds this class, whatever backend
the task is for, so that the same code runs under Django's own ImmediateBackend and DummyBackend, and on
Django 6.0, whose decorator knows no further keywords.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from inspect import iscoroutinefunction
from typing import Any, overload

from . import payload
from .backoff import Backoff, is_backoff
from .compat import InvalidTask, TaskContext, TaskResult
from .compat import Task as DjangoTask
from .conf import (
    MAX_JOB_KEY_LENGTH,
    MAX_QUEUE_NAME_LENGTH,
    MAX_TASK_PATH_LENGTH,
    is_attempt_count,
    is_job_key,
    is_queue_name,
)

DEFAULT = "default"


class InvalidTaskOption(InvalidTask, ValueError):
    """A setting of a task is wrong: raised where the task is defined, or by ``using()``."""


@dataclass(frozen=True, kw_only=True)
class Task(DjangoTask):
    """
    A function that can be enqueued.

    *max_attempts* and *backoff* are the task's own, or ``None`` for the backend's options. *backoff* is
    seconds, a ``timedelta``, or ``backoff(exception, task_result)`` that returns one of them, or ``None``
    for "do not retry". *timeout* is in whole seconds: a task that runs longer is interrupted by
    `TaskTimeout`, and the attempt counts.

    An *atomic* task runs in a transaction on the jobs' database, on its own connection, and its end is
    written in the same one: what it did there and "done" are committed together, or neither is.

    ``max_attempts`` is copied to the row at enqueue; ``backoff`` is read from the code that runs.

    *job_key* is set by ``using()`` only. While a live job of the task has that key, enqueue makes no other.
    """

    max_attempts: int | None = None
    backoff: Backoff | None = None
    timeout: int | None = None
    atomic: bool = False
    job_key: str | None = None

    def __post_init__(self) -> None:
        _check_settings(self)
        super().__post_init__()

    def enqueue(self, *args: Any, **kwargs: Any) -> TaskResult:
        """
        Insert a job that calls the task with these arguments, in the transaction that is open now.

        With a ``job_key`` that a live job of this task holds, nothing is inserted and that job's result is
        returned; its ``created`` is False. See `JobResult`.

        Raises ``TypeError`` or ``ValueError``, before any SQL, for arguments that do not fit the
        signature or cannot be stored as JSON; the message names the argument.
        """
        backend = self._checking_backend(args, kwargs)
        return backend.enqueue(self, args, kwargs)

    async def aenqueue(self, *args: Any, **kwargs: Any) -> TaskResult:
        """See enqueue()."""
        backend = self._checking_backend(args, kwargs)
        return await backend.aenqueue(self, args, kwargs)

    def enqueue_many(
        self, calls: Iterable[Sequence[Any] | dict[str, Any]], *, job_keys: Iterable[str | None] | None = None
    ) -> list[int]:
        """
        Insert one job for each of *calls* and return their ids, in the same order.

        A call is a list or tuple of positional arguments, or a dictionary of keyword arguments. *job_keys*
        gives each its key, or ``None``. Where a live job holds the key, and where it was given before in
        the same call, that job's id is returned instead. All jobs are inserted or none. Like
        ``bulk_create()`` it sends no signals. Raises what `enqueue` raises, naming the call, and
        ``NotImplementedError`` on a backend that is not PgQueueBackend.
        """
        backend = self.get_backend()
        if not hasattr(backend, "enqueue_many"):
            raise NotImplementedError(f"{type(backend).__name__} cannot enqueue many jobs at once.")
        return backend.enqueue_many(self, calls, job_keys)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return super().call(*self._with_our_context(args), **kwargs)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        return await super().acall(*self._with_our_context(args), **kwargs)

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        job_key: str | None = None,
    ) -> "Task":
        """Return the task with other routing: Django's four settings and ``job_key``, each checked now."""
        given: dict[str, Any] = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "backend": backend,
            "job_key": job_key,
        }
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def _checking_backend(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        backend = self.get_backend()
        if not getattr(backend, "checks_calls", False):  # Django's own accept what production would refuse
            payload.encode_call(self.func, self.takes_context, args, kwargs)
        return backend

    def _with_our_context(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.takes_context and args and isinstance(args[0], TaskContext) and not isinstance(args[0], Context):
            return (Context(task_result=args[0].task_result), *args[1:])
        return args


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(TaskResult):  # type: ignore[misc]  # frozen, too, which the stubs do not say
    """A TaskResult of this backend. *created* is False when enqueue found a live job with the same key."""

    created: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(TaskContext):  # type: ignore[misc]  # frozen, too, which the stubs do not say
    """
    What a task with ``takes_context=True`` gets as its first argument.

    ``task_result`` is the attempt's TaskResult, ``attempt`` its number, from 1.
    """

    is_cancelled: Callable[[], bool] = bool

    @property
    def cancelled(self) -> bool:
        """
        Whether the claim of this attempt was lost or the job cancelled: what it returns is not recorded any more.

        Also True while nobody knows: the database has not answered for as long as a lease lasts, so another
        worker may be running the job already. A long task asks now and then, and ends; if it does not, it
        is interrupted five seconds after a claim that is certainly lost.
        """
        return self.is_cancelled()


@overload
def task(function: Callable[..., Any], /) -> Task: ...


@overload
def task(
    *,
    priority: int = 0,
    queue_name: str = DEFAULT,
    backend: str = DEFAULT,
    takes_context: bool = False,
    max_attempts: int | None = None,
    backoff: Backoff | None = None,
    timeout: int | None = None,
    atomic: bool = False,
) -> Callable[[Callable[..., Any]], Task]: ...


def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    priority: int = 0,
    queue_name: str = DEFAULT,
    backend: str = DEFAULT,
    takes_context: bool = False,
    max_attempts: int | None = None,
    backoff: Backoff | None = None,
    timeout: int | None = None,
    atomic: bool = False,
) -> Task | Callable[[Callable[..., Any]], Task]:
    """
    Make a module-level function, sync or async, a task: ``@task`` or ``@task(queue_name="email")``.

    Raises ``InvalidTask`` for settings that cannot work, where the task is defined.
    """

    def decorate(func: Callable[..., Any]) -> Task:
        return Task(
            func=func,
            priority=priority,
            queue_name=queue_name,
            backend=backend,
            run_after=None,
            takes_context=takes_context,
            max_attempts=max_attempts,
            backoff=backoff,
            timeout=timeout,
            atomic=atomic,
        )

    return decorate if function is None else decorate(function)


def rerouted(task: DjangoTask, **changes: Any) -> DjangoTask:
    """Return *task* with *changes* that are not checked: an old row may name a queue that is gone."""
    if all(getattr(task, name) == value for name, value in changes.items()):
        return task
    twin = object.__new__(type(task))
    for name in task.__dataclass_fields__:
        object.__setattr__(twin, name, changes[name] if name in changes else getattr(task, name))
    return twin


def _check_settings(task: Task) -> None:
    if not callable(task.func) or not hasattr(task.func, "__module__") or not hasattr(task.func, "__qualname__"):
        raise InvalidTaskOption(f"A task must be a function, not {task.func!r}.")
    name = task.func.__qualname__
    if isinstance(task.priority, bool) or not isinstance(task.priority, int):
        raise InvalidTaskOption(f"{name}: priority must be a whole number from -100 to 100, not {task.priority!r}.")
    if not is_queue_name(task.queue_name):
        raise InvalidTaskOption(
            f"{name}: queue_name must be text of 1 to {MAX_QUEUE_NAME_LENGTH} characters, not {task.queue_name!r:.80}."
        )
    if len(task.module_path) > MAX_TASK_PATH_LENGTH:
        raise InvalidTaskOption(
            f"{task.module_path:.60}…: a task's path may have at most {MAX_TASK_PATH_LENGTH} characters."
        )
    if task.run_after is not None and not isinstance(task.run_after, datetime):
        raise InvalidTaskOption(f"{name}: run_after must be a datetime, not {task.run_after!r}.")
    if task.run_after is not None and not _is_in_calendar(task.run_after):
        raise InvalidTaskOption(f"{name}: run_after must be in the years 1 to 9999 of UTC, not {task.run_after!r}.")
    if task.max_attempts is not None and not is_attempt_count(task.max_attempts):
        raise InvalidTaskOption(
            f"{name}: max_attempts must be a whole number of at least 1, not {task.max_attempts!r}."
        )
    if task.backoff is not None and not is_backoff(task.backoff):
        raise InvalidTaskOption(
            f"{name}: backoff must be seconds, a timedelta or a callable that is not async, not {task.backoff!r}."
        )
    if task.job_key is not None and not is_job_key(task.job_key):
        raise InvalidTaskOption(
            f"{name}: job_key must be text of 1 to {MAX_JOB_KEY_LENGTH} characters, not {task.job_key!r:.80}."
        )
    if task.timeout is not None and not is_attempt_count(task.timeout):
        raise InvalidTaskOption(f"{name}: timeout must be whole seconds, at least 1, not {task.timeout!r}.")
    if not isinstance(task.atomic, bool):
        raise InvalidTaskOption(f"{name}: atomic must be True or False, not {task.atomic!r}.")
    if task.atomic and iscoroutinefunction(task.func):
        raise InvalidTaskOption(f"{name}: an async task cannot be atomic; Django's transactions belong to a thread.")


def _is_in_calendar(moment: datetime) -> bool:
    """Whether Python can read *moment* again in the database's time zone."""
    try:
        return moment.tzinfo is None or bool(moment.astimezone(UTC))
    except OverflowError:
        return False
