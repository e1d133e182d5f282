"""
The thread, one in each process of a worker, that sees to it that the others do not wait for ever.

The limits of the server end a slow statement. But where its answer never arrives, as in a network that has
swallowed the connection without a word, only someone beside the waiting thread can end the wait.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from .connection import Session

logger = logging.getLogger("django_pgqueue")

LONGEST_PAUSE_SECONDS = 1.0
SHORTEST_PAUSE_SECONDS = 0.05


class Watchdog(threading.Thread):
    """
    Looks after the *sessions*, several times within the shortest of their limits and at least once a second.

    *each_turn* is called each time, too: a sign of life of the interpreter.
    """

    def __init__(self, sessions: Iterable[Session], each_turn: Callable[[], object] = lambda: None) -> None:
        super().__init__(name="pgqueue-watchdog", daemon=True)
        self._sessions = list(sessions)
        self._each_turn = each_turn
        shortest = min(session.limit_seconds for session in self._sessions)
        self._pause = max(min(shortest / 4, LONGEST_PAUSE_SECONDS), SHORTEST_PAUSE_SECONDS)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End, and wait for the end."""
        self._stopping.set()
        self.join()

    def run(self) -> None:
        while not self._stopping.wait(self._pause):
            try:
                self._each_turn()
                for session in self._sessions:
                    session.break_off(time.monotonic())
            except Exception:  # a thread begins here, and nobody looks after it
                logger.exception("The watchdog failed; it goes on.")
