"""
The jobs that wait for a slot, and the slots that wait for a job.

A slot takes the next job without a lock, and goes on taking, so that one slot runs through short jobs as fast
as it can. The others are called one after the other: whoever takes a job while more are waiting calls the
next, and calls nobody as long as one that was called has not come. So jobs that last, or wait for something,
are soon spread over all slots, while jobs that are over at once wake one more than they need, and not all.

There is no lost call: a slot lies down first and then looks once more; whoever brings jobs does so first, and
then looks who sleeps; and one that was called says so before it looks for jobs.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from .held import HeldJob

Bell = threading.Lock  # a slot's own; who sleeps waits for it to be released


def new_bell() -> threading.Lock:
    bell = Bell()
    bell.acquire()
    return bell


class Line:
    """First come, first served. `give` and `take_back` are for the control loop, `take` for slots."""

    def __init__(self) -> None:
        self._jobs: deque[HeldJob | None] = deque()
        self._asleep: list[threading.Lock] = []
        self._has_called = False  # and whom it called has not come yet

    def give(self, jobs: Iterable[HeldJob | None]) -> None:
        """Let slots run *jobs*, each one; ``None`` ends the slot that takes it."""
        self._jobs.extend(jobs)
        self._call()

    def take(self, bell: threading.Lock) -> HeldJob | None:
        """Return the next job, for the slot that has this *bell*; wait for it if there is none."""
        while True:
            try:
                job = self._jobs.popleft()
            except IndexError:
                self._sleep(bell)
                continue
            if self._jobs and self._asleep and not self._has_called:
                self._call()
            return job

    def take_if(self, fits: Callable[[HeldJob], bool]) -> HeldJob | None:
        """Return the next job if there is one and it *fits*. For a slot that is awake."""
        try:
            job = self._jobs.popleft()
        except IndexError:
            return None
        if job is None or not fits(job):
            self._jobs.appendleft(job)
            return None
        if self._jobs and self._asleep and not self._has_called:
            self._call()
        return job

    def rest(self, bell: threading.Lock) -> None:
        """Let the slot that waits for its *bell* be called again."""
        self._asleep.append(bell)
        if self._jobs:
            self._call()

    def wait(self, bell: threading.Lock) -> None:
        """Return when the slot that has this *bell* is called, after someone has let it `rest`."""
        bell.acquire()
        self._has_called = False

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def take_back(self) -> list[HeldJob]:
        """Return the jobs that no slot has taken."""
        jobs: list[HeldJob] = []
        with suppress(IndexError):
            while True:
                if (job := self._jobs.popleft()) is not None:
                    jobs.append(job)
        return jobs

    def _call(self) -> None:
        if self._has_called:
            return
        self._has_called = True
        try:
            bell = self._asleep.pop()  # the one that has slept shortest
        except IndexError:
            self._has_called = False
        else:
            bell.release()

    def _sleep(self, bell: threading.Lock) -> None:
        self._asleep.append(bell)
        if self._jobs:
            try:
                self._asleep.remove(bell)
            except ValueError:
                pass  # it was called in between
            else:
                return
        self.wait(bell)
