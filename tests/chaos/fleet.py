"""
The workers: real ``runworker`` trees, each in a process group of its own, so that a whole tree can be hit at once.

The fleet keeps its number. A worker that a fault has ended, or told to end, is replaced; one that ended by itself is
replaced, too, and counted, for that is what must not happen.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 4.0
FLAGS = ("--processes", "2", "--concurrency", "4", "--grace", str(GRACE_SECONDS), "--max-jobs", "500")
ROOT = Path(__file__).resolve().parent.parent.parent


class Worker:
    """One tree. *is_ours_to_end* is whether a fault has ended it or told it to end."""

    def __init__(self, number: int, directory: Path, flags: Sequence[str] = FLAGS) -> None:
        self.number = number
        self.is_ours_to_end = False
        self.log_file = directory / f"worker-{number}.log"
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "django", "runworker", *flags],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __str__(self) -> str:
        return f"worker {self.number}"

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        return bool(self.children)

    @property
    def children(self) -> list[int]:
        """The process ids of its children that have said that they are ready."""
        said = {int(pid) for pid in re.findall(r"Child (\d+) is ready", self.log_file.read_text(errors="replace"))}
        return sorted(pid for pid in said if self._has(pid))

    def signal_supervisor(self, number: signal.Signals) -> None:
        """To the supervisor alone."""
        self.process.send_signal(number)

    def signal_child(self, pid: int, number: signal.Signals) -> None:
        if self._has(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_all(self, number: signal.Signals) -> None:
        """To the whole tree; nothing happens if none of it is left."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        self.signal_all(signal.SIGKILL)
        self.process.wait()

    def _has(self, pid: int) -> bool:
        """Whether *pid* is a process of this tree, and not one that came later under the same number."""
        try:
            return os.getpgid(pid) == self.process.pid
        except ProcessLookupError:
            return False


class Fleet:
    def __init__(self, size: int, directory: Path, flags: Sequence[str] = FLAGS) -> None:
        self._size = size
        self._flags = flags
        self._directory = directory
        self._count = 0
        self.working: list[Worker] = []
        self._leaving: list[Worker] = []
        self.ended_by_themselves: list[str] = []
        self.would_not_end: list[str] = []

    @property
    def all(self) -> list[Worker]:
        """Those that work, and those that have ended or are about to."""
        return [*self.working, *self._leaving]

    def tend(self) -> list[str]:
        """Replace those that have ended, or begun to; say what was found that should not be."""
        found = []
        for worker in [worker for worker in self.working if worker.is_ours_to_end or not worker.is_alive]:
            self.working.remove(worker)
            self._leaving.append(worker)
            if not worker.is_ours_to_end:
                found.append(f"{worker} ended by itself with exit code {worker.process.returncode}")
                self.ended_by_themselves.append(str(worker))
        while len(self.working) < self._size:
            self._count += 1
            self.working.append(Worker(self._count, self._directory, self._flags))
        return found

    def stop(self, patience: float) -> None:
        """SIGTERM to all, and wait for the orderly end of each."""
        for worker in self.working:
            if not worker.is_alive and not worker.is_ours_to_end:
                self.ended_by_themselves.append(str(worker))
            worker.signal_supervisor(signal.SIGTERM)
        deadline = time.monotonic() + patience
        for worker in self.all:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.would_not_end.append(str(worker))
        self._leaving += self.working
        self.working = []

    def end(self) -> None:
        """Whatever is left of any tree is gone when this returns."""
        for worker in self.all:
            worker.end()
