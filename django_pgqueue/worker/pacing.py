"""
How many jobs a child claims at a time.

As many as it has slots, and on top of that what the slots will finish in a tenth of a second: short jobs
come in large batches, long ones are never hoarded. Nor are large ones, because a buffer is memory.
"""

BUFFERED_SECONDS = 0.1
MAX_BUFFERED = 4_000
LARGE_CLAIM = 1_000  # there is room for more than so many: a claim is worth it, even if half of the buffer is left
MAX_BUFFERED_CHARS = 16_000_000  # of arguments
WEIGHT = 0.05  # of the newest job in the average


class Pacing:
    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._average = BUFFERED_SECONDS  # seconds of a job; until there is one, no buffer
        self._average_chars = 0.0  # of a job's arguments

    @staticmethod
    def capacity(slots: int) -> int:
        """The most jobs that a child with so many *slots* ever holds: those in hand, and those not settled yet."""
        return slots + 2 * MAX_BUFFERED

    def claimed(self, jobs: int, chars: int) -> None:
        """Learn how many *chars* the arguments of so many *jobs* take: from large ones at once, from small slowly."""
        average = chars / jobs
        weight = 1 if average > self._average_chars else WEIGHT
        self._average_chars += weight * (average - self._average_chars)

    def finished(self, seconds: float) -> None:
        """Learn from a job that took so many *seconds*."""
        self._average += WEIGHT * (seconds - self._average)

    def stalled(self) -> None:
        """Learn that buffered jobs found no slot in time."""
        self._average = max(self._average, BUFFERED_SECONDS)

    def wanted(self, held: int) -> int:
        """Return how many jobs to claim while *held* wait or run; none if a buffer has room for few."""
        buffer = min(
            int(self._slots * BUFFERED_SECONDS / max(self._average, 1e-6)) - self._slots,
            int(MAX_BUFFERED_CHARS / max(self._average_chars, 1.0)),
            MAX_BUFFERED,
        )
        if buffer <= 0:
            return max(self._slots - held, 0)
        room = self._slots + buffer - held
        return room if room > min(buffer - buffer // 2, LARGE_CLAIM) else 0
