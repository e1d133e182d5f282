"""How much memory this process uses, and whether that is too much."""

import logging
import resource
import sys
import time
from pathlib import Path

logger = logging.getLogger("django_pgqueue")

WEIGH_SECONDS = 1.0  # between two looks

_STATM = Path("/proc/self/statm")


def resident_megabytes() -> float:
    """Return what is in memory now, in units of 1,048,576 bytes; where the system does not say, the most there was."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1_024  # bytes there, kilobytes elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1_048_576
    return pages * resource.getpagesize() / 1_048_576


class Scales:
    """For a process that may use so many megabytes, or any number if *limit* is ``None``."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._weigh_at = 0.0  # monotonic

    def show_too_much(self) -> bool:
        """Whether the process has grown too large, and say so; false between two looks."""
        if self._limit is None or time.monotonic() < self._weigh_at:
            return False
        self._weigh_at = time.monotonic() + WEIGH_SECONDS
        if (used := resident_megabytes()) > self._limit:
            logger.info("Uses %d MB, more than --max-memory allows; no more jobs are claimed here.", used)
            return True
        return False
