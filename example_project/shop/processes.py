"""Start the shop's worker beside another process, and stop it with that process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings

GRACE_SECONDS = 25


@contextmanager
def running_worker(*flags: str, log: Path | None = None, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """
    Run ``manage.py runworker`` with *flags* for the time of the block; afterwards its ``returncode`` is set.

    It writes to *log*, or where this process writes. *environment* is added to its environment.
    """
    command = [sys.executable, str(settings.BASE_DIR / "manage.py"), "runworker", "--grace", str(GRACE_SECONDS), *flags]
    output = log.open("wb") if log else None
    # A session of its own: Ctrl-C reaches this process alone, which then stops the worker, once.
    worker = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
    )
    if output:
        output.close()
    try:
        yield worker
    finally:
        _stop(worker)


def interrupt_on_termination() -> None:
    """Make SIGTERM and SIGHUP raise ``KeyboardInterrupt`` like Ctrl-C, so that blocks are left in order."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def _stop(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(GRACE_SECONDS + 10)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
