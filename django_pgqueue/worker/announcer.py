"""
The child's thread that says how attempts have ended, once that is committed: log lines and ``task_finished``.

Receivers are the project's and may be slow, so no round waits for them. But what they have not been told
yet is kept in memory, so the child claims no more while they are far behind.
"""

import logging
import threading
from collections.abc import Sequence
from contextvars import copy_context
from queue import SimpleQueue

from ..outcomes import Outcome
from . import attempt
from .attempt import Attempted
from .cleaning import begin_fresh, leave_clean

logger = logging.getLogger("django_pgqueue")

FAR_BEHIND = 1_000

Ending = tuple[Attempted, Outcome]


class Announcer:
    """``start()`` it, ``announce()`` from one thread, then ``finish()`` and ask whether it `has_ended`."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[Sequence[Ending] | None] = SimpleQueue()
        self._given = 0  # counted by whoever announces
        self._told = 0  # and by the announcer
        self._thread = threading.Thread(target=self._work, name="pgqueue-announcer", daemon=True)

    @property
    def is_far_behind(self) -> bool:
        return self._given - self._told >= FAR_BEHIND

    def start(self) -> None:
        self._thread.start()

    def announce(self, endings: Sequence[Ending]) -> None:
        """Tell of attempts, each with its outcome as it was written and committed."""
        self._given += len(endings)
        self._ended.put(endings)

    def finish(self) -> None:
        """Let it end after what it has still to announce."""
        self._ended.put(None)

    def has_ended(self, patience: float) -> bool:
        """Wait up to *patience* seconds; whether it has ended."""
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (endings := self._ended.get()) is not None:
            for attempted, written in endings:
                try:
                    begin_fresh()
                    copy_context().run(
                        _announce, attempted, written
                    )  # whatever a receiver activates ends with the copy
                except BaseException:  # a thread begins here, and the next one is to be announced, too
                    logger.exception("Announcing the end of job %s failed.", attempted.job.id)
                finally:
                    leave_clean()
                    self._told += 1


def _announce(attempted: Attempted, written: Outcome) -> None:
    attempt.log(attempted, written)
    attempt.announce(attempted, written)
