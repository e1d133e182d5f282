"""How much memory this process uses."""

import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_megabytes() -> float:
    """Return what is in memory now, in units of 1,048,576 bytes; where the system does not say, the most there was."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1_024  # bytes there, kilobytes elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1_048_576
    return pages * resource.getpagesize() / 1_048_576
