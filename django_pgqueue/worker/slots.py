"""
The places where jobs run: one thread each, and one event loop that all async tasks share.

A slot takes a job from the `Line`, marks it started, runs one attempt, leaves the thread's connections as a new task
expects them, and puts the outcome where the control loop finds it. A thread whose task was interrupted is
not trusted any more: another takes its place.

An async task needs no thread. Its slot's thread hands it to the event loop and sleeps, and the loop runs one async
job after the other in that slot, until none is next in line: then the slot may be called again. So there are
never more jobs than slots, and short ones follow each other without a change of threads.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import lru_cache, partial
from inspect import iscoroutinefunction
from typing import Any

from .. import registry
from ..backoff import Backoff
from ..compat import Task, is_received, task_started
from ..exceptions import Interruption
from ..outcomes import Failed, Released, Succeeded
from . import attempt
from .atomic import atomically
from .attempt import Attempted
from .cleaning import begin_fresh, leave_clean
from .event_loop import EventLoop, call_apart
from .held import HeldJob
from .holdings import Holdings
from .interruption import AsyncCode, SyncCode
from .line import Line, new_bell

logger = logging.getLogger("django_pgqueue")


@dataclass(slots=True)
class Slots:
    """
    *count* threads that run jobs. ``on_finish`` is called, in a slot's thread, after each.

    Jobs that have finished stand in `finished`, in no particular order.
    """

    count: int
    holdings: Holdings
    backoff: Backoff | None
    database: str
    on_finish: Callable[[], None]
    on_limit: Callable[[], object] = bool  # called when a task with a deadline begins
    finished: deque[HeldJob] = field(default_factory=deque)
    _running: dict[int, HeldJob] = field(default_factory=dict)
    _line: Line = field(default_factory=Line)
    _threads: dict[int, threading.Thread] = field(default_factory=dict)
    event_loop: EventLoop = field(init=False)

    def __post_init__(self) -> None:
        self.event_loop = EventLoop(helpers=self.count)

    def start(self) -> None:
        for number in range(1, self.count + 1):
            self._start(number)

    def give(self, jobs: Iterable[HeldJob]) -> None:
        """Let the next free slots run *jobs*, in this order."""
        self._line.give(jobs)

    @property
    def has_waiting(self) -> bool:
        """Whether there are jobs that no slot has begun."""
        return self._line.has_jobs

    def take_back(self) -> list[HeldJob]:
        """Return the jobs that no slot has begun."""
        return self._line.take_back()

    def running(self) -> list[HeldJob]:
        """Return the jobs that slots have begun and not finished. From any thread."""
        return list(self._running.copy().values())

    def stop(self) -> None:
        """End the threads; every job must have finished."""
        self._line.give([None] * self.count)
        for number in range(1, self.count + 1):
            thread = self._threads[number]
            while thread.is_alive():
                thread.join()
                thread = self._threads[number]  # one that was interrupted has a successor
        self.event_loop.stop()

    def _start(self, number: int) -> None:
        # Daemons: a task that outlasts the grace period must not keep the process.
        thread = threading.Thread(target=self._work, args=(number,), name=f"pgqueue-slot-{number}", daemon=True)
        self._threads[number] = thread
        thread.start()

    def _work(self, number: int) -> None:
        bell = new_bell()
        is_sound = True
        while is_sound and (job := self._line.take(bell)) is not None:
            self._begin(number, job)
            if _suits_the_loop(job):
                self.event_loop.start(self._work_async(number, bell, job))
                del job
                self._line.wait(bell)
                continue
            job.attempted = self._attempt(job)
            self._end(number, job)
            if _was_interrupted(job):
                is_sound = not self._replace(number)
            self._hand_back(job)
            del job  # nobody knows how long the next is waited for

    async def _work_async(self, number: int, bell: threading.Lock, job: HeldJob) -> None:
        """In the event loop, which has the slot until there is no job for it."""
        job.attempted = await self._attempt_async(job)
        self._end(number, job)
        self._hand_back(job)
        if (following := self._line.take_if(_suits_the_loop)) is None:
            self._line.rest(bell)
        else:
            self._begin(number, following)
            self.event_loop.go_on_with(self._work_async(number, bell, following))

    def _begin(self, number: int, job: HeldJob) -> None:
        self.holdings.start(job.place)
        self._running[number] = job

    def _end(self, number: int, job: HeldJob) -> None:
        del self._running[number]
        # The task has ended in time, however long it takes to settle it: the database may be away.
        job.deadline = float("inf")
        self.holdings.finish(job.place)

    def _hand_back(self, job: HeldJob) -> None:
        self.finished.append(job)
        self.on_finish()

    def _replace(self, number: int) -> bool:
        """Whether another thread could be started in the place of this one."""
        try:
            self._start(number)
        except RuntimeError as error:  # too many threads, or no memory: better this one than none
            logger.warning("The thread of an interrupted task runs others, too: %s.", error)
            self._threads[number] = threading.current_thread()
            return False
        return True

    def _attempt(self, job: HeldJob) -> Attempted:
        if job.is_lost:
            return Attempted(job.job, Released(job.claim), None, None, 0.0)
        try:
            begin_fresh()
            # A copy, so that a language, a time zone or any other context of the task ends with it.
            return copy_context().run(attempt.run, job.job, self.backoff, job.earlier, _InSlot(self, job))
        except BaseException as error:  # a thread begins here: it must outlive whatever this was
            return _broken(job, error)
        finally:
            is_sound = not _was_interrupted(job)
            leave_clean(may_keep=is_sound, may_use=is_sound)

    async def _attempt_async(self, job: HeldJob) -> Attempted:
        if job.is_lost:
            return Attempted(job.job, Released(job.claim), None, None, 0.0)
        try:
            return await attempt.run_async(job.job, self.backoff, job.earlier, _InSlot(self, job))
        except BaseException as error:
            return _broken(job, error)


class _InSlot(attempt.Surroundings):
    """What an attempt meets in one of *slots*."""

    __slots__ = ("_job", "_slots")
    settles = True

    def __init__(self, slots: Slots, job: HeldJob) -> None:
        self._slots = slots
        self._job = job

    def call(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if _is_async(task.func):
            return self._slots.event_loop.run(self.call_async(task, args, kwargs))
        code = SyncCode()
        self._enter(code, task)
        # The function itself, not through the task: no frame of ours is entered once it has returned.
        return code.run(partial(task.func, *args, **kwargs))

    async def call_async(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        code = AsyncCode(asyncio.get_running_loop())
        self._enter(code, task)
        return await call_apart(code, task.func, args, kwargs)

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        return await self._slots.event_loop.in_thread(function)

    def atomically(self, perform: Callable[[], Succeeded]) -> Succeeded:
        def note() -> None:
            self._job.is_settling = True

        return atomically(self._slots.database, self._job.claim, perform, before_settling=note)

    def is_lost(self) -> bool:
        """Also when it may be: nobody knows who had no answer from the database for a lease."""
        job, vitals = self._job, self._slots.holdings.vitals()
        return job.is_lost or time.monotonic() > max(job.lease_ends, vitals.leased)

    def reason(self) -> type[Interruption] | None:
        return None if self._job.code is None else self._job.code.reason

    def _enter(self, code: SyncCode | AsyncCode, task: Task) -> None:
        """The task is about to be called, as *code*: from now on it can be interrupted."""
        job = self._job
        job.takes_context = task.takes_context
        job.code = code
        if (timeout := getattr(task, "timeout", None)) is not None:
            job.deadline = time.monotonic() + timeout
            self._slots.holdings.limit(job.place, job.deadline)
            self._slots.on_limit()


_is_async = lru_cache(maxsize=4096)(iscoroutinefunction)


def _suits_the_loop(job: HeldJob) -> bool:
    """Whether the event loop can take *job* as it is: it must not import a module, nor call a receiver."""
    task = registry.known(job.job.task_path)
    return task is not None and _is_async(task.func) and not is_received(task_started)


def _broken(job: HeldJob, error: BaseException) -> Attempted:
    logger.exception("A slot failed around job %s.", job.job.id)
    return Attempted(job.job, Failed(job.claim, attempt.ErrorRecord.of(error)), None, error, 0.0)


def _was_interrupted(job: HeldJob) -> bool:
    """Whether an exception was raised in the slot's thread from outside; an async task is only cancelled."""
    return isinstance(job.code, SyncCode) and job.code.reason is not None
