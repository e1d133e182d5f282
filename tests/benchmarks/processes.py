"""Processes of a worker: started, ended, and what they use, as Linux tells it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .environments import ROOT

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PATIENCE_SECONDS = 10.0  # for an orderly end


class Workers:
    """Started *commands*, each in a process group of its own. *log* is where they print."""

    def __init__(self, commands: Sequence[Sequence[str]], environment: dict[str, str], log: Path) -> None:
        self.log_file = log
        with log.open("w") as output:
            self.processes = [
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command in commands
            ]

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def have_ended(self) -> bool:
        """Whether one of them has, which none should."""
        return any(process.poll() is not None for process in self.processes)

    @property
    def roots(self) -> list[int]:
        return [process.pid for process in self.processes]

    @property
    def below(self) -> list[int]:
        """The processes that those started have started in turn."""
        return [pid for root in self.roots for pid in tree(root) if pid != root]

    def stop(self) -> None:
        """SIGTERM, and wait for the end; whoever does not end is killed."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def running(commands: Sequence[Sequence[str]], environment: dict[str, str], log: Path) -> Iterator[Workers]:
    workers = Workers(commands, environment, log)
    try:
        yield workers
    finally:
        workers.stop()


class Driver:
    """A *command* of a system's driver that has been started."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._command = command
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def answer(self) -> Any:
        """Wait for its end, and return what it answered in its last line."""
        output, _ = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"{' '.join(self._command)} failed:\n{output[-4000:]}")
        return json.loads(output.splitlines()[-1])

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def tree(pid: int) -> list[int]:
    """*pid* and all that descend from it."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """What *pids* have used until now, and those of their children that have ended."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / TICKS_PER_SECOND


def pss_mb(pid: int) -> float:
    """The memory of a process, what it shares divided among those that share it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
