"""What a child says to its supervisor: single bytes in a pipe, and two moments in the mapping."""

import os
import time
from contextlib import suppress

from .holdings import Holdings

STARTED = b"s"  # it is ready
MORE_JOBS = b"m"  # there are more jobs than it could take
RESTS = b"r"  # from now on it has a free slot and nothing for it

MORE_JOBS_PAUSE_SECONDS = 0.02  # a busy child says so after each claim, which would cost it and its supervisor a lot


class Voice:
    """For the control loop. *descriptor* is the pipe's; ``None`` for a child that nobody listens to."""

    def __init__(self, descriptor: int | None, holdings: Holdings) -> None:
        self._descriptor = descriptor
        self._holdings = holdings
        self._told = (0.0, 0.0)  # since when it rests, and when it last found a job
        self._more_jobs_at = float("inf")  # monotonic; when to say that there are
        self._may_say_more_at = 0.0

    @property
    def next_at(self) -> float:
        """When there is something to say, by the monotonic clock."""
        return self._more_jobs_at

    def note_claim(self, *, was_filled: bool) -> None:
        """A claim was made and published, and filled or not: there may be more jobs, or there are none."""
        self._more_jobs_at = max(time.monotonic(), self._may_say_more_at) if was_filled else float("inf")
        self.speak()

    def speak(self) -> None:
        """Say what it is time to say."""
        now = time.monotonic()
        if now >= self._more_jobs_at:
            self._more_jobs_at = float("inf")
            self._may_say_more_at = now + MORE_JOBS_PAUSE_SECONDS
            self.say(MORE_JOBS)

    def tell_rest(self, rests_since: float, found_at: float) -> None:
        """Let the supervisor know since when a slot is free and has nothing to do, and when a job was last found."""
        told = (rests_since, found_at)
        if told != self._told:
            self._holdings.note(rested=rests_since, found=found_at)
            if rests_since and not self._told[0]:
                self.say(RESTS)
            self._told = told

    def say(self, word: bytes) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # a full pipe says it already
                os.write(self._descriptor, word)
