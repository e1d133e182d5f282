"""
One attempt of one job: find the task, decode the call, call it, and say how it ended.

Nothing is written here. Whoever has claimed the job, a slot or a test, settles the outcome.
"""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import psycopg
from django.utils.module_loading import import_string

from .. import payload, registry, results
from ..backoff import Backoff, default_delay, delay_after, seconds
from ..compat import Task, TaskResult, is_heard, task_backends, task_finished, task_started
from ..exceptions import Fail, Interruption, Retry, Snooze, TaskTimeout, UnstorableResult
from ..outcomes import (
    MAX_MESSAGE_CHARS,
    MAX_TRACEBACK_CHARS,
    ErrorRecord,
    Failed,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)
from ..statements.claim import ClaimedJob, EarlierAttempt
from ..tasks import Context
from .interruption import chain_of

logger = logging.getLogger("django_pgqueue")

UNKNOWN_TASK_DELAY_SECONDS = 30.0
MAX_UNKNOWN_TASKS = 100  # that this process warns of, each once: its jobs come again and again
_INTERRUPTED = (
    Interruption,
    asyncio.CancelledError,
    concurrent.futures.CancelledError,
    psycopg.errors.QueryCanceled,
)
MAX_SNOOZES = 1_000  # of one job since it was enqueued or requeued


class Surroundings:
    """Where an attempt is made: here and now, unless a subclass knows better."""

    __slots__ = ()
    settles = False  # whether what `atomically` returns is written and committed

    def call(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call *task* in this thread; an async one in an event loop of its own."""
        return task.call(*args, **kwargs)

    async def call_async(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call *task*, which is async, in the event loop that runs."""
        return await task.func(*args, **kwargs)

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Return what *function* returns: what may block, as a backoff that asks the database."""
        return function()

    def atomically(self, perform: Callable[[], Succeeded]) -> Succeeded:
        """Run an atomic task by *perform* in one transaction; here the caller sees to that."""
        return perform()

    def is_lost(self) -> bool:
        """Whether the claim is lost, for the task to ask."""
        return False

    def reason(self) -> type[Interruption] | None:
        """What the worker has interrupted the task for, if it has."""
        return None


@dataclass(slots=True)
class Begun:
    """
    An attempt whose task is known and may be called, with `arguments` and *kwargs*.

    Its ``TaskResult`` is made when it is asked for: most tasks succeed without anyone looking at it.
    """

    job: ClaimedJob
    task: Task
    args: list[Any]
    kwargs: dict[str, Any]
    earlier: Sequence[EarlierAttempt]
    began: float  # monotonic
    _result: TaskResult | None = None

    @property
    def result(self) -> TaskResult:
        if self._result is None:
            self._result = results.of_claim(self.job, self.task, self.args, self.kwargs, self.earlier)
        return self._result

    def arguments(self, surroundings: Surroundings) -> Sequence[Any]:
        """Return what the function is called with: before *args*, the context if it takes one."""
        if not self.task.takes_context:
            return self.args
        return [Context(task_result=self.result, is_cancelled=surroundings.is_lost), *self.args]

    def perform(self, surroundings: Surroundings) -> Succeeded:
        """Call the task and return how the attempt ends by that; raises what the task or `succeeded` raises."""
        return self.succeeded(surroundings.call(self.task, self.arguments(surroundings), self.kwargs))

    def succeeded(self, value: Any) -> Succeeded:
        """Return how the attempt ends by *value*; raises what `failed` takes if it cannot be stored."""
        try:
            return Succeeded(self.job.claim, payload.encode_result(value))
        except Exception as error:  # it would be refused after every retry
            raise _Unstorable from error

    def failed(self, error: BaseException, reason: type[Interruption] | None, backoff: Backoff | None) -> "Attempted":
        """Return what the attempt came to by *error*. *reason* and *backoff* are as in `Surroundings` and `run`."""
        outcome: Outcome
        if isinstance(error, _Unstorable):
            assert error.__cause__ is not None
            error = error.__cause__
            outcome = Failed(self.job.claim, ErrorRecord.plain(UnstorableResult, ErrorRecord.of(error).message))
        elif _is_from_keyboard(error):
            raise error
        else:
            error, outcome = _caught(self, error, reason, backoff)
        return self.ended(outcome, error)

    def ended(self, outcome: Outcome, error: BaseException | None = None, is_settled: bool = False) -> "Attempted":
        return Attempted(self.job, outcome, self, error, time.monotonic() - self.began, is_settled)


class Attempted(NamedTuple):
    """
    What an attempt came to. *begun* is ``None`` when the task was never called, *error* when it returned.

    *is_settled*: the outcome is written and committed already, with what the task did.
    """

    job: ClaimedJob
    outcome: Outcome
    begun: Begun | None
    error: BaseException | None
    seconds: float
    is_settled: bool = False


class _Unstorable(Exception):
    """The task has returned what cannot be stored; the error says why."""


PLAIN = Surroundings()


def run(
    job: ClaimedJob,
    backoff: Backoff | None,
    earlier: Sequence[EarlierAttempt] = (),
    surroundings: Surroundings = PLAIN,
) -> Attempted:
    """
    Run *job*, claimed, and return how it ended; never raises for what the job is or does.

    *backoff* is the backend's rule, *earlier* the counted attempts before this one.
    """
    begun = begin(job, earlier)
    if isinstance(begun, Attempted):
        return begun
    try:
        if getattr(begun.task, "atomic", False):
            perform = partial(begun.perform, surroundings)
            return begun.ended(surroundings.atomically(perform), is_settled=surroundings.settles)
        return begun.ended(begun.perform(surroundings))
    except BaseException as error:  # SystemExit, too, is only the end of this attempt
        return begun.failed(error, surroundings.reason(), backoff)


async def run_async(
    job: ClaimedJob,
    backoff: Backoff | None,
    earlier: Sequence[EarlierAttempt],
    surroundings: Surroundings,
) -> Attempted:
    """Run *job*, whose task is async and was found before, as `run` does, in the event loop that calls this."""
    begun = begin(job, earlier)
    if isinstance(begun, Attempted):
        return begun
    try:
        value = await surroundings.call_async(begun.task, begun.arguments(surroundings), begun.kwargs)
        return begun.ended(begun.succeeded(value))
    except BaseException as error:
        # The exception is not the thread's, and neither are its frames.
        failed = partial(begun.failed, error, surroundings.reason(), backoff)
    return await surroundings.in_thread(failed)


def begin(job: ClaimedJob, earlier: Sequence[EarlierAttempt]) -> Begun | Attempted:
    """Find the task of *job*, decode the call and tell that it starts; or return how it ends without being called."""
    try:
        task = registry.find(job.task_path)
    except registry.UnknownTask as error:
        # Another worker may know it already, or this one after the deploy: wait, and count nothing.
        waiting = Released(job.claim, UNKNOWN_TASK_DELAY_SECONDS, reason=ErrorRecord.of(error).summary)
        return Attempted(job, waiting, None, error, 0.0)
    try:
        args, kwargs = payload.decode_call(job.args, job.kwargs)
    except ValueError as error:
        return Attempted(job, Failed(job.claim, ErrorRecord.of(error)), None, error, 0.0)
    begun = Begun(job, task, args, kwargs, earlier, time.monotonic())
    if is_heard(task_started, logging.INFO):
        task_started.send_robust(sender=_sender(job), task_result=begun.result)
    return begun


def _caught(
    begun: Begun, error: BaseException, reason: type[Interruption] | None, backoff: Backoff | None
) -> tuple[BaseException, Outcome]:
    """Return the error to tell of, and how the attempt ends by it."""
    task = begun.task
    if isinstance(error, Interruption):
        reason = reason or type(error)  # an atomic task finds out by itself that its claim is lost
    own_rule = getattr(task, "backoff", None)
    rule = backoff if own_rule is None else own_rule
    has_decided = isinstance(error, Retry | Snooze | Fail)  # whatever made the task raise it
    if reason is None or has_decided or not _comes_from_interruption(error):
        return error, _ending(begun, error, rule)
    if reason is TaskTimeout:
        timeout = TaskTimeout(f"The task ran for longer than its timeout of {getattr(task, 'timeout', '?')} s.")
        if isinstance(error, TaskTimeout):
            timeout.__traceback__, timeout.__cause__ = error.__traceback__, error.__cause__
        else:
            timeout.__cause__ = error
        ending = _ending(begun, timeout, rule)
        assert not isinstance(ending, Snoozed)
        return timeout, replace(ending, ending="timeout")
    # Interrupted: it goes back. Lost or cancelled: the row has been changed, and this will change nothing.
    return error, Released(begun.job.claim, started=True)


def _comes_from_interruption(error: BaseException) -> bool:
    """
    Whether *error* is how an interruption shows itself: raised, cancelled, or a statement that was cancelled.

    Or an error that came of it, as when a transaction in the middle of a statement cannot be rolled back.
    """
    return any(isinstance(link, _INTERRUPTED) for link in chain_of(error))


def are_successes_heard() -> bool:
    """Whether `log` or `announce` would do anything for an attempt that succeeded."""
    return logger.isEnabledFor(logging.DEBUG) or is_heard(task_finished, logging.INFO)


def announce(attempted: Attempted, written: Outcome) -> None:
    """Send ``task_finished`` for a final outcome, as it was *written* and committed."""
    if attempted.begun is None or not isinstance(written, Succeeded | Failed):
        return
    if not is_heard(task_finished, logging.INFO if isinstance(written, Succeeded) else logging.ERROR):
        return
    result = attempted.begun.result
    error: BaseException | None = None
    if isinstance(written, Succeeded):
        results.finish(result, None, written.result)
    else:
        results.finish(result, written.error)
        error = attempted.error if _is_printable(written.error) else None  # Django's own receiver prints it
    send = partial(task_finished.send_robust, sender=_sender(attempted.job), task_result=result)
    if error is None:
        send()
    else:
        _call_in_handler(error, send)


def log(attempted: Attempted, written: Outcome) -> None:
    """Say how an attempt ended, as it was *written* and committed."""
    job = attempted.job
    extra = {"job_id": job.id, "task_path": job.task_path, "queue_name": job.queue_name, "attempt": job.attempts}
    match written:
        case Succeeded():
            logger.debug("Job %s (%s) done in %.3f s.", job.id, job.task_path, attempted.seconds, extra=extra)
        case Retried(error=error, delay_seconds=delay):
            logger.warning(
                "Job %s (%s) failed in attempt %s of %s and runs again in %.1f s: %s",
                *(job.id, job.task_path, job.attempts, job.max_attempts, delay, error.summary),
                extra=extra,
            )
        case Failed(error=error):
            logger.error(
                "Job %s (%s) failed for good in attempt %s of %s: %s",
                *(job.id, job.task_path, job.attempts, job.max_attempts, error.summary),
                exc_info=attempted.error if _is_printable(error) else None,
                extra=extra,
            )
        case Snoozed(delay_seconds=delay):
            logger.info("Job %s (%s) is snoozed for %.1f s.", job.id, job.task_path, delay, extra=extra)
        case Released(started=False, delay_seconds=delay) if attempted.error is not None:
            logger.log(
                _level_of_unknown(job.task_path),
                "Job %s (%s) cannot be run here and waits %.0f s for a worker that can: %s",
                *(job.id, job.task_path, delay, attempted.error),
                extra=extra,
            )
        case Released(started=True):
            logger.info("Job %s (%s) was interrupted and goes back to the queue.", job.id, job.task_path, extra=extra)


_unknown_tasks: set[str] = set()  # those that were warned of


def _level_of_unknown(task_path: str) -> int:
    if task_path in _unknown_tasks or len(_unknown_tasks) >= MAX_UNKNOWN_TASKS:
        return logging.DEBUG
    _unknown_tasks.add(task_path)
    return logging.WARNING


def _sender(job: ClaimedJob) -> type | None:
    """The class of the job's backend, which may be a subclass of ours; a row may name a backend that is gone."""
    # Not of an instance: Django makes one for each context, and each job has its own.
    configured = task_backends.settings.get(job.backend)
    return import_string(configured["BACKEND"]) if configured is not None else None


def _ending(begun: Begun, error: BaseException, rule: Backoff | None) -> Retried | Snoozed | Failed:
    job, claim = begun.job, begun.job.claim
    record = ErrorRecord.of(error)
    if isinstance(error, Snooze) and job.snoozes < MAX_SNOOZES:
        return Snoozed(claim, _seconds_or_default(error.delay, job))
    if isinstance(error, Fail | Snooze) or job.attempts >= job.max_attempts:
        return Failed(claim, record)
    try:
        if isinstance(error, Retry) and error.delay is not None:
            delay: float | None = seconds(error.delay)
        else:
            delay = delay_after(rule, job.attempts, error, begun.result)
    except BaseException as broken:  # a rule that fails must not cost the job its retry
        if _is_from_keyboard(broken):
            raise
        logger.exception("The backoff of %s failed; the default applies.", job.task_path)
        delay = default_delay(job.attempts)
    return Failed(claim, record) if delay is None else Retried(claim, delay, record)


def _seconds_or_default(delay: object, job: ClaimedJob) -> float:
    try:
        return seconds(delay)  # type: ignore[arg-type]  # checked there
    except (TypeError, ValueError) as error:
        logger.error("Job %s (%s) was snoozed for %r; %s The default applies.", job.id, job.task_path, delay, error)
        return default_delay(1)


def _is_from_keyboard(error: BaseException) -> bool:
    """Whether *error* is the person's at the keyboard, not the task's: Python raises it in the main thread."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _call_in_handler(error: BaseException, call: Callable[[], object]) -> None:
    """Call as if in the handler of *error*: receivers of ``task_finished`` may look at ``sys.exc_info()``."""
    origin = error.__traceback__
    try:
        raise error
    except BaseException:
        error.__traceback__ = origin  # without this frame
        call()


def _is_printable(error: ErrorRecord) -> bool:
    """Whether a log may print the exception itself, which has no bounds, instead of our summary of it."""
    return len(error.message) < MAX_MESSAGE_CHARS and len(error.traceback) < MAX_TRACEBACK_CHARS
