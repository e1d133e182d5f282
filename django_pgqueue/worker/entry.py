"""
Where the process of a child begins and ends: ``python -m django_pgqueue.worker.entry``.

Its standard input is the supervisor's pipe. The first line says what to do, the others are for the control
loop. Around that loop, the process is kept apart from what tasks start: they get neither the pipe, nor its
handlers of signals, nor a say in when it ends.
"""

import gc
import json
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

from .child import Child
from .config import WorkerConfig
from .holdings import Holdings
from .logs import configure_logging
from .pacing import Pacing
from .voice import STARTED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# The interpreter's own 5 ms would pass after each answer of the database before the control loop can read it, as
# long as a slot has short jobs to run.
SWITCH_SECONDS = 0.0005


def main() -> None:
    code = 1
    try:
        code = _serve(_take_over_stdin())
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Whatever still runs here must not keep the process: its claims would be renewed for ever.
    os._exit(code)


def _take_over_stdin() -> TextIO:
    """Return standard input, and leave an empty one: the subprocesses of tasks would read the supervisor's words."""
    words = os.fdopen(os.dup(0), encoding="ascii")  # not inheritable
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return words


def _serve(words: TextIO) -> int:
    parameters: dict[str, Any] = json.loads(words.readline())
    voice, bell = parameters["voice"], parameters["bell"]
    os.set_blocking(voice, False)
    os.set_blocking(bell, False)
    for descriptor in (voice, bell, parameters["holdings"]):
        os.set_inheritable(descriptor, False)  # subprocesses of tasks have no business with them
    config = WorkerConfig.from_json(parameters["config"])
    child_of: list[Child] = []

    def stop(signum: int, frame: Any) -> None:
        if not child_of:  # nothing is claimed yet
            os._exit(0)
        child_of[0].stop(config.grace)

    signal.signal(signal.SIGTERM, stop)
    # A Ctrl-C reaches the whole group, and the supervisor decides. A handler, because the subprocesses of
    # tasks would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOP_SIGNALS),  # one that comes too early waits
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOP_SIGNALS),
        after_in_child=_take_signals_as_usual,
    )

    sys.setswitchinterval(SWITCH_SECONDS)

    import django

    django.setup()
    configure_logging(config.log_level)
    holdings = Holdings(parameters["holdings"], Pacing.capacity(config.concurrency))
    child = Child(config, parameters["owner"], parameters["application_name"], holdings, words, voice, bell)
    child_of.append(child)
    # What is here now stays: no collection need walk over it again. What is garbage already must not stay.
    gc.collect()
    gc.freeze()
    os.write(voice, STARTED)
    return child.run()


def _take_signals_as_usual() -> None:
    """In a process that a task has forked, such as a pool of multiprocessing, which ends its members by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


if __name__ == "__main__":
    main()
