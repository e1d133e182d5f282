"""
The child's thread that ends tasks which have to end: over their timeout, lost, cancelled, or in the way of a stop.

It sleeps until the nearest deadline. Cancelling a statement takes a connection to the database, and must
delay neither the control loop nor the sign of life.
"""

import logging
import threading
import time
from collections.abc import Callable

from ..exceptions import Interruption, TaskTimeout
from .held import HeldJob

logger = logging.getLogger("django_pgqueue")

AGAIN_SECONDS = 5.0  # before a task that has swallowed an interruption gets another
SOON_SECONDS = 0.1  # for a slot to call the task of a job that it has just taken
COURTESY_SECONDS = 5.0  # for a task that takes the context to see by itself that its claim is lost


def courtesy(held: HeldJob) -> float:
    """The seconds that the task has to see by itself that its claim is lost."""
    return COURTESY_SECONDS if held.takes_context else 0.0


class Interrupter(threading.Thread):
    """*running* returns the jobs that slots have begun. Call `wake` when one has got a deadline."""

    def __init__(self, running: Callable[[], list[HeldJob]]) -> None:
        super().__init__(name="pgqueue-interrupter", daemon=True)
        self._running = running
        self._alarm = threading.Event()
        self._is_stopping = False
        self._stop_reason: type[Interruption] | None = None
        self._next_at: dict[HeldJob, float] = {}

    def wake(self) -> None:
        """Look at the deadlines anew. From any thread."""
        self._alarm.set()

    def interrupt_all(self, reason: type[Interruption]) -> None:
        """End everything that runs, for *reason*."""
        self._stop_reason = reason
        self._alarm.set()

    def stop(self) -> None:
        """Interrupt nothing more, and end."""
        self._is_stopping = True
        self._alarm.set()
        self.join()

    def run(self) -> None:
        while not self._is_stopping:
            self._alarm.clear()
            try:
                pause = self._look()
            except Exception:  # a thread begins here; the other tasks have deadlines, too
                logger.exception("Interrupting a task failed; trying again.")
                pause = 1.0
            self._alarm.wait(pause)

    def _look(self) -> float | None:
        """Interrupt what has to end; return the seconds until there is more to do, ``None`` for "nothing known"."""
        running = self._running()
        self._next_at = {held: self._next_at[held] for held in running if held in self._next_at}
        for held in running:
            why, at = self._sentence(held)
            if why is None or held.code is None or held.is_settling or self._is_stopping:
                continue
            at = self._next_at.setdefault(held, at)
            if at <= time.monotonic():
                self._next_at[held] = time.monotonic() + AGAIN_SECONDS
                held.code.interrupt(why)
        # What settles has an end of its own, and may be past its deadline for as long as that takes.
        nearest = min((self._due_at(held) for held in running if not held.is_settling), default=float("inf"))
        return None if nearest == float("inf") else max(nearest - time.monotonic(), 0.0)

    def _due_at(self, held: HeldJob) -> float:
        return time.monotonic() + SOON_SECONDS if held.code is None else self._next_at.get(held, held.deadline)

    def _sentence(self, held: HeldJob) -> tuple[type[Interruption] | None, float]:
        """Why *held* has to end, if it has to, and from when on."""
        now = time.monotonic()
        if held.lost_for is not None:
            return held.lost_for, now + courtesy(held)
        if self._stop_reason is not None:
            return self._stop_reason, now
        if held.deadline <= now:
            return TaskTimeout, held.deadline
        return None, held.deadline
