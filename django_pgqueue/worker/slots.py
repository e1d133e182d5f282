"""
The places where jobs run: one thread each, and one event loop that all async tasks share.

A slot takes a job, marks it started, runs one attempt, leaves the thread's connections as a new task
expects them, and puts the outcome where the control loop finds it.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from queue import Empty, SimpleQueue
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async

from ..backoff import Backoff
from ..compat import Task
from ..outcomes import Claim, Failed
from ..statements.claim import ClaimedJob, EarlierAttempt
from . import attempt
from .attempt import Attempted
from .cleaning import begin_fresh, leave_clean
from .holdings import Holdings

logger = logging.getLogger("django_pgqueue")

STOP_SECONDS = 1.0  # for the event loop to end


@dataclass(slots=True, eq=False)
class HeldJob:
    """A claimed job in this child's hands. *place* is where it stands in the holdings."""

    job: ClaimedJob
    earlier: Sequence[EarlierAttempt]
    place: int
    is_lost: bool = False  # set by the control loop, read by the task's context
    attempted: Attempted | None = None

    @property
    def claim(self) -> Claim:
        return Claim(self.job.id, self.job.claim_version)


@dataclass(slots=True)
class Slots:
    """
    *count* threads that run jobs. ``on_finish`` is called, in a slot's thread, after each.

    Jobs that have finished stand in `finished`, in no particular order.
    """

    count: int
    holdings: Holdings
    backoff: Backoff | None
    on_finish: Callable[[], None]
    finished: deque[HeldJob] = field(default_factory=deque)
    interrupted: bool = False
    _todo: "SimpleQueue[HeldJob | None]" = field(default_factory=SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)
    _async: "AsyncTasks" = field(default_factory=lambda: AsyncTasks())

    def start(self) -> None:
        for number in range(1, self.count + 1):
            # Daemons: a task that outlasts the grace period must not keep the process.
            thread = threading.Thread(target=self._work, name=f"pgqueue-slot-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def give(self, job: HeldJob) -> None:
        """Let the next free slot run *job*."""
        self._todo.put(job)

    def take_back(self) -> list[HeldJob]:
        """Return the jobs that no slot has begun."""
        jobs: list[HeldJob] = []
        while True:
            try:
                job = self._todo.get_nowait()
            except Empty:
                return jobs
            if job is not None:
                jobs.append(job)

    def interrupt(self) -> None:
        """Cancel the async tasks; sync tasks cannot be stopped from outside and run on."""
        self.interrupted = True
        self._async.cancel_all()

    def stop(self) -> None:
        """End the threads; every job must have finished."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._async.stop()

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            self.holdings.start(job.place)
            job.attempted = self._attempt(job)
            self.finished.append(job)
            self.on_finish()

    def _attempt(self, job: HeldJob) -> Attempted:
        try:
            begin_fresh()
            # A copy, so that a language, a time zone or any other context of the task ends with it.
            return copy_context().run(
                attempt.run,
                job.job,
                self.backoff,
                job.earlier,
                call=self._call,
                is_lost=lambda: job.is_lost,
                is_interrupted=lambda: self.interrupted,
            )
        except BaseException as error:  # a thread begins here: it must outlive whatever this was
            logger.exception("A slot failed around job %s.", job.job.id)
            return Attempted(job.job, Failed(job.claim, attempt.ErrorRecord.of(error)), None, error, 0.0)
        finally:
            leave_clean()

    def _call(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if iscoroutinefunction(task.func):
            return self._async.run(task, args, kwargs)
        return task.call(*args, **kwargs)


class AsyncTasks:
    """One event loop in a thread of its own, started by the first async task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: set[asyncio.Task[Any]] = set()  # touched in the loop's thread only
        self._stopping = False

    def run(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run *task* in the loop while the calling slot waits; raises what it raises."""
        return asyncio.run_coroutine_threadsafe(self._run(task, args, kwargs), self._started_loop()).result()

    def cancel_all(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_running)

    def stop(self) -> None:
        """End the loop, if it ends soon: something that a task has left behind may block it."""
        if self._loop is not None and self._thread is not None:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    async def _run(self, task: Task, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        this = asyncio.current_task()
        assert this is not None
        self._running.add(this)
        try:
            # Of its own, so that each task's synchronous parts have a thread and connections of their own.
            async with ThreadSensitiveContext():
                try:
                    return await task.acall(*args, **kwargs)
                finally:
                    await sync_to_async(leave_clean, thread_sensitive=True)(may_keep=False)
        finally:
            self._running.discard(this)

    def _cancel_running(self) -> None:
        for running in self._running:
            running.cancel()

    def _started_loop(self) -> asyncio.AbstractEventLoop:
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
