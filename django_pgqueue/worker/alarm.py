"""
By what a child's control loop sleeps, and is woken.

Its own threads and handlers of signals ring. The supervisor does so from outside, by single bytes in a pipe that the
loop itself waits at: a thread between the two would cost each job a tenth of a millisecond.
"""

import os
import select
import weakref
from contextlib import suppress

WAKE = b"w"  # there are jobs, as far as one knows
MORE = b"m"  # there may be some that another child could not take
LOOK = b"l"  # it is time to look whether there are any


class Alarm:
    """*bell* is the descriptor of the supervisor's pipe, if there is one; its reading end, which does not block."""

    def __init__(self, bell: int | None = None) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._bell = bell
        self._waits_at = [self._reader] if bell is None else [self._reader, bell]
        weakref.finalize(self, _close, self._reader, self._writer)

    def ring(self) -> None:
        """End the sleep, or the next one. From any thread."""
        with suppress(BlockingIOError):  # a full pipe wakes, too
            os.write(self._writer, b"!")

    def sleep(self, seconds: float) -> bytes:
        """Sleep until someone rings, *seconds* at most; return the supervisor's words."""
        heard = b""
        for descriptor in select.select(self._waits_at, [], [], seconds)[0]:
            words = os.read(descriptor, 4096)
            if descriptor == self._bell:
                heard = words
                if not words:  # it is dead, and the other pipe says so, too
                    self._waits_at = [self._reader]
        return heard


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
