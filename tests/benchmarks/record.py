"""
The record of what ran: each execution of a job appends its number and the moment to a file of its process.

It is the same few microseconds for every system that is measured, and it is what runs are checked against: a
number that is missing was lost, one that is there twice was run twice. Those who enqueue at a steady rate record
their commits in the same way, in another folder. The clock is the machine's monotonic one,
which all its processes share. Nothing here needs a package, because the workers of other systems import it.
"""

import os
import struct
import time
from pathlib import Path

RECORD = struct.Struct("<qq")  # the job's number, nanoseconds

_folder = os.environ.get("BENCH_RECORDS", "")
_pack = RECORD.pack
_file = -1


def record(number: int) -> None:
    """Append that job *number* runs now."""
    if _file < 0:
        _open()
    os.write(_file, _pack(number, time.monotonic_ns()))


def _open() -> None:
    global _file
    _file = os.open(f"{_folder}/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def _forget() -> None:
    global _file
    _file = -1


os.register_at_fork(after_in_child=_forget)


class Records:
    """What has been recorded in *folder*."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def count(self) -> int:
        return sum(entry.stat().st_size for entry in os.scandir(self.folder)) // RECORD.size

    def processes(self) -> int:
        """How many processes have recorded something."""
        return sum(entry.stat().st_size > 0 for entry in os.scandir(self.folder))

    def read(self) -> list[tuple[int, int]]:
        """Return every (number, nanoseconds), the earliest first."""
        found = [pair for path in self.folder.iterdir() for pair in RECORD.iter_unpack(path.read_bytes())]
        return sorted(found, key=lambda pair: pair[1])

    def moments(self) -> dict[int, int]:
        """Return the nanoseconds of each number, of which none is there twice."""
        return dict(self.read())

    def first_of_each(self) -> list[int]:
        """Return when each process recorded first."""
        return sorted(RECORD.unpack(path.read_bytes()[: RECORD.size])[1] for path in self.folder.iterdir())
