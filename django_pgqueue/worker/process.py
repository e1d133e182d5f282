"""
A child as its supervisor sees it: a fresh interpreter, three pipes, and the table of claims that both map.

The pipe to its standard input carries words and life: when the supervisor dies, it ends. A word is written
whole or, when the child does not read, not at all: what was lost is said again at the next renewal, and to stop there
is a signal, too. That there are jobs is said through another pipe, in single bytes.
"""

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..outcomes import Claim
from .alarm import LOOK, MORE, WAKE
from .config import WorkerConfig
from .holdings import Held, Holdings, Vitals
from .pacing import Pacing
from .voice import MORE_JOBS, RESTS, STARTED

# A write of at most PIPE_BUF bytes, 4,096 on Linux and 512 by POSIX, is never done by halves.
CLAIMS_IN_A_WORD = max(select.PIPE_BUF // 64, 1)


class Said(NamedTuple):
    has_started: bool = False
    has_more_jobs: bool = False  # it found more than it could take
    rests: bool = False  # from then on it had a free slot and nothing for it


class ChildProcess:
    """
    One started child. *owner* begins every name that it claims under.

    *voice* is the descriptor that becomes readable when it has said something, or is dead.
    """

    def __init__(self, config: WorkerConfig) -> None:
        token = secrets.token_hex(4)
        self.application_name = f"pgqueue child {os.getpid()} {token}"
        self.was_told_to_stop = False
        self._lock = threading.Lock()  # upkeep and listener speak to it, too
        self._is_forgotten = False
        self._holdings = Holdings.create(Pacing.capacity(config.concurrency))
        self.voice, voice = os.pipe()
        bell, self._bell = os.pipe()
        os.set_blocking(self.voice, False)
        os.set_blocking(self._bell, False)
        try:
            self._process = self._start(voice, bell)
        except OSError:
            os.close(self.voice)
            os.close(self._bell)
            self._holdings.close()
            raise
        finally:
            os.close(voice)
            os.close(bell)
        self.owner = f"{socket.gethostname()[:180]}:{self._process.pid}:{token}"
        self._say_line(
            {
                "config": config.to_json(),
                "owner": self.owner,
                "application_name": self.application_name,
                "holdings": self._holdings.descriptor,
                "voice": voice,
                "bell": bell,
            }
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def _start(self, voice: int, bell: int) -> "subprocess.Popen[bytes]":
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
        return subprocess.Popen(
            [sys.executable, "-m", "django_pgqueue.worker.entry"],
            stdin=subprocess.PIPE,
            pass_fds=(self._holdings.descriptor, voice, bell),
            env={**os.environ, "PYTHONPATH": paths},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def said(self) -> Said:
        """What it has said since this was asked last."""
        with suppress(BlockingIOError):
            words = os.read(self.voice, 4096)
            return Said(STARTED in words, MORE_JOBS in words, RESTS in words)
        return Said()

    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal, or ``None`` while it lives."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for its end; its exit code, or ``None`` if it lives on."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        self._process.kill()

    def held(self) -> list[Held]:
        """The claims that it holds now, or held when it died; none once it is forgotten."""
        with self._lock:
            return [] if self._is_forgotten else self._holdings.read()

    def held_count(self) -> int:
        """How many claims it holds."""
        with self._lock:
            return 0 if self._is_forgotten else self._holdings.count()

    def stop(self, grace: float) -> None:
        """Tell it to finish what runs, within *grace* seconds."""
        self.was_told_to_stop = True
        if not self._say_line({"word": "stop", "grace": grace}):
            self.terminate()  # this will be there when it comes to itself

    def terminate(self) -> None:
        """The same by a signal, which reaches it wherever it is."""
        self._process.terminate()

    def wake(self) -> None:
        """Tell it that there are jobs, as far as one knows."""
        self._ring(WAKE)

    def tell_of_more(self) -> None:
        """Tell it that there may be jobs: another child has taken as many as it could."""
        self._ring(MORE)

    def look(self) -> None:
        """Tell it that it is time to look whether there are jobs."""
        self._ring(LOOK)

    def tell_lost(self, claims: list[Claim], *, by_cancellation: bool = False) -> None:
        """Tell it that *claims* are not its own any more."""
        word = "cancelled" if by_cancellation else "lost"
        for start in range(0, len(claims), CLAIMS_IN_A_WORD):
            self._say_line({"word": word, "claims": claims[start : start + CLAIMS_IN_A_WORD]})

    def is_stopped(self) -> bool:
        """Whether it stands still by a signal or a debugger, where the system can tell."""
        try:
            # The name, which may contain anything, is in brackets; the state follows.
            return Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1] in ("T", "t")
        except OSError:
            return False

    def vitals(self) -> Vitals:
        with self._lock:
            return Vitals(0.0, 0.0, 0.0, 0.0) if self._is_forgotten else self._holdings.vitals()

    def note_renewal(self, until: float) -> None:
        """Let it know that what it held when it was read is its own *until* that moment, monotonic."""
        with self._lock:
            if not self._is_forgotten:
                self._holdings.note(leased=until)

    def forget(self) -> None:
        """Close what connects the two, after its death."""
        assert self._process.stdin is not None
        with self._lock:
            self._is_forgotten = True
            with suppress(OSError):
                self._process.stdin.close()
            os.close(self.voice)
            os.close(self._bell)
            self._holdings.close()

    def _ring(self, word: bytes) -> None:
        with self._lock, suppress(BlockingIOError, BrokenPipeError):  # a full pipe says it already
            if not self._is_forgotten:
                os.write(self._bell, word)

    def _say_line(self, words: dict[str, Any]) -> bool:
        """Whether the pipe took it."""
        assert self._process.stdin is not None
        with self._lock, suppress(BlockingIOError, BrokenPipeError):
            if not self._is_forgotten:
                os.write(self._process.stdin.fileno(), json.dumps(words).encode() + b"\n")
                return True
        return False
