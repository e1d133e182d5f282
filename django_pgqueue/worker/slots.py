"""
The places where jobs run: one thread each, and one event loop that all async tasks share.

A slot takes a job from the `Line`, marks it started, runs one attempt, leaves the thread's connections as a new task
expects them, and puts the outcome where the control loop finds it. A thread whose task was interrupted is
not trusted any more: another takes its place.
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

from asgiref.sync import ThreadSensitiveContext, sync_to_async

from ..backoff import Backoff
from ..compat import Task
from ..exceptions import Interruption
from ..outcomes import Failed, Released, Succeeded
from . import attempt
from .atomic import atomically
from .attempt import Attempted
from .cleaning import begin_fresh, leave_clean
from .held import HeldJob
from .holdings import Holdings
from .interruption import AsyncCode, SyncCode
from .line import Line, new_bell

logger = logging.getLogger("django_pgqueue")

STOP_SECONDS = 1.0  # for the event loop to end


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
    async_tasks: "AsyncTasks" = field(default_factory=lambda: AsyncTasks())
    _running: dict[int, HeldJob] = field(default_factory=dict)
    _line: Line = field(default_factory=Line)
    _threads: dict[int, threading.Thread] = field(default_factory=dict)

    def start(self) -> None:
        for number in range(1, self.count + 1):
            self._start(number)

    def give(self, jobs: Iterable[HeldJob]) -> None:
        """Let the next free slots run *jobs*, in this order."""
        self._line.give(jobs)

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
        self.async_tasks.stop()

    def _start(self, number: int) -> None:
        # Daemons: a task that outlasts the grace period must not keep the process.
        thread = threading.Thread(target=self._work, args=(number,), name=f"pgqueue-slot-{number}", daemon=True)
        self._threads[number] = thread
        thread.start()

    def _work(self, number: int) -> None:
        bell = new_bell()
        is_sound = True
        while is_sound and (job := self._line.take(bell)) is not None:
            self.holdings.start(job.place)
            self._running[number] = job
            job.attempted = self._attempt(job)
            del self._running[number]
            # The task has ended in time, however long it takes to settle it: the database may be away.
            job.deadline = float("inf")
            self.holdings.finish(job.place)
            if _was_interrupted(job):
                is_sound = not self._replace(number)
            self.finished.append(job)
            del job  # nobody knows how long the next is waited for
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
            logger.exception("A slot failed around job %s.", job.job.id)
            return Attempted(job.job, Failed(job.claim, attempt.ErrorRecord.of(error)), None, error, 0.0)
        finally:
            is_sound = not _was_interrupted(job)
            leave_clean(may_keep=is_sound, may_use=is_sound)


class _InSlot(attempt.Surroundings):
    """What an attempt meets in one of *slots*."""

    __slots__ = ("_job", "_slots")
    settles = True

    def __init__(self, slots: Slots, job: HeldJob) -> None:
        self._slots = slots
        self._job = job

    def call(self, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        job, tasks = self._job, self._slots.async_tasks
        job.takes_context = task.takes_context
        job.code = code = AsyncCode(tasks.loop()) if _is_async(task.func) else SyncCode()
        if (timeout := getattr(task, "timeout", None)) is not None:
            self._limit(timeout)
        if isinstance(code, AsyncCode):
            return tasks.run(code, task, args, kwargs)
        # The function itself, not through the task: no frame of ours is entered once it has returned.
        return code.run(partial(task.func, *args, **kwargs))

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

    def _limit(self, seconds: float) -> None:
        self._job.deadline = time.monotonic() + seconds
        self._slots.holdings.limit(self._job.place, self._job.deadline)
        self._slots.on_limit()


_is_async = lru_cache(maxsize=4096)(iscoroutinefunction)


def _was_interrupted(job: HeldJob) -> bool:
    """Whether an exception was raised in the slot's thread from outside; an async task is only cancelled."""
    return isinstance(job.code, SyncCode) and job.code.reason is not None


class AsyncTasks:
    """One event loop in a thread of its own, started by the first async task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def run(self, code: AsyncCode, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run *task* in the loop while the calling slot waits; raises what it raises."""
        return asyncio.run_coroutine_threadsafe(self._run(code, task, args, kwargs), self.loop()).result()

    def stop(self) -> None:
        """End the loop, if it ends soon: something that a task has left behind may block it."""
        if self._loop is not None and self._thread is not None:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    async def _run(self, code: AsyncCode, task: Task, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Of its own, so that each task's synchronous parts have a thread and connections of their own.
        async with ThreadSensitiveContext():
            try:
                return await code.run(task.acall(*args, **kwargs))
            finally:
                await sync_to_async(leave_clean, thread_sensitive=True)(may_keep=False)

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop, running."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._work, args=(self._loop,), name="pgqueue-async", daemon=True
                )
                self._thread.start()
            return self._loop

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopping:
            try:
                loop.run_forever()
            except BaseException:
                # A SystemExit ends its task and leaves the loop, which has others to run.
                logger.debug("An async task has left the event loop; going on.", exc_info=True)
