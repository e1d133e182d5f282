"""
The process that a person starts: it keeps a child running, passes signals on, and runs no task itself.

The main thread does nothing but watch: signals and the child's death wake it. Everything that talks to
the database happens in `Upkeep` and `Listener`, so that a database that does not answer delays no signal.
"""

import logging
import os
import secrets
import select
import signal
import socket
import time
from types import FrameType

import psycopg

from ..statements import claim as claiming
from ..statements.database import is_lock_conflict
from .config import WorkerConfig
from .connection import Outage, Session
from .listener import Listener
from .process import ChildProcess
from .upkeep import Death, Upkeep, cause_of

logger = logging.getLogger("django_pgqueue")

LOOK_SECONDS = 1.0
FIRST_RESTART_PAUSE_SECONDS = 0.1
LONGEST_RESTART_PAUSE_SECONDS = 5.0
HEALTHY_SECONDS = 60.0  # after this long a child's death is not counted with those before it
MAX_EARLY_DEATHS = 6  # in a row, before a child has said that it started
KILL_AFTER_SECONDS = 5.0  # past the grace period
BURIAL_PATIENCE_SECONDS = 5.0

EXIT_OK = 0
EXIT_CHILD_CANNOT_START = 1
EXIT_FORCED = 3


class Supervisor:
    """Run one worker. Installs handlers for SIGTERM and SIGINT, so it belongs in the main thread."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"[:200]
        self._child: ChildProcess | None = None
        self._child_started = False
        self._child_since = 0.0
        self._early_deaths = 0
        self._restart_pause = FIRST_RESTART_PAUSE_SECONDS
        self._restart_at = 0.0
        self._signals = 0
        self._stop_by: float | None = None
        self._drained = False
        self._upkeep = Upkeep(config, self._name, self._children)
        self._listener = Listener(config, self._wake_child)

    def run(self) -> int:
        """Work until told to stop, or in burst mode until nothing is left; return the process's exit code."""
        self._watch_signals()
        logger.info(
            "Worker %s starts: queues %s, %d slots, database %r.",
            *(os.getpid(), self._config.queues, self._config.concurrency, self._config.database),
        )
        if not self._wait_for_database():
            return EXIT_OK
        self._upkeep.start()
        self._listener.start()
        try:
            code = self._supervise()
        finally:
            self._listener.stop()
            self._upkeep.stop(BURIAL_PATIENCE_SECONDS)
        logger.info("Worker %s ends.", os.getpid())
        return code

    # ---- signals

    def _watch_signals(self) -> None:
        # A signal wakes select(), whatever the main thread is about to do.
        self._wake_reader, wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        wake_writer.setblocking(False)
        self._wake_writer = wake_writer
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to wake

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _sleep(self, seconds: float) -> None:
        ready, _, _ = select.select([self._wake_reader], [], [], seconds)
        if ready:
            self._wake_reader.recv(4096)

    # ---- the child

    def _supervise(self) -> int:
        while True:
            if self._signals and self._stop_by is None:
                self._begin_stop()
            if self._signals > 1:
                return self._force()
            self._look_after_child()
            if self._child is None:
                if self._stop_by is not None or self._drained:
                    return EXIT_OK
                if self._early_deaths >= MAX_EARLY_DEATHS:
                    logger.error(
                        "The worker's child has died %d times before it could start; giving up.", self._early_deaths
                    )
                    return EXIT_CHILD_CANNOT_START
                if time.monotonic() >= self._restart_at:
                    self._start_child()
            elif self._stop_by is not None and time.monotonic() > self._stop_by + KILL_AFTER_SECONDS:
                logger.warning("The child has not ended in its grace period and is killed.")
                self._child.kill()
                self._child.wait(KILL_AFTER_SECONDS)
                continue
            self._sleep(self._pause())

    def _pause(self) -> float:
        if self._child is None:
            return min(LOOK_SECONDS, max(self._restart_at - time.monotonic(), 0.0))
        return LOOK_SECONDS

    def _start_child(self) -> None:
        self._child_started = False
        self._child_since = time.monotonic()
        try:
            self._child = ChildProcess(self._config)
        except OSError as error:  # no memory, or too many processes or files
            self._early_deaths += 1
            self._plan_restart()
            logger.error("A child could not be started (%s).", error)

    def _look_after_child(self) -> None:
        child = self._child
        if child is None:
            return
        if not self._child_started and child.has_started():
            self._child_started = True
            self._early_deaths = 0
            logger.info("Child %s is ready.", child.pid)
        exit_code = child.exit_code()
        if exit_code is None:
            return
        self._child = None
        # A burst is over when the child ends and holds nothing; a task, too, can end the process with 0.
        expected = exit_code == 0 and (child.was_told_to_stop or (self._config.burst and not child.held()))
        if not self._child_started and not child.was_told_to_stop:
            self._early_deaths += 1
        self._upkeep.report(
            Death(child.owner, child.application_name, child.held(), cause_of(exit_code), child.was_told_to_stop)
        )
        child.forget()
        if expected:
            self._drained = self._config.burst
            return
        if self._stop_by is None:
            self._plan_restart()
            logger.error(
                "Child %s died (%s); another starts in %.1f s.",
                *(child.pid, cause_of(exit_code), max(self._restart_at - time.monotonic(), 0.0)),
            )

    def _plan_restart(self) -> None:
        if time.monotonic() - self._child_since > HEALTHY_SECONDS:
            self._restart_pause = FIRST_RESTART_PAUSE_SECONDS
        self._restart_at = time.monotonic() + self._restart_pause
        self._restart_pause = min(self._restart_pause * 2, LONGEST_RESTART_PAUSE_SECONDS)

    def _begin_stop(self) -> None:
        logger.info("Stopping: no more jobs are claimed, running ones have %g s.", self._config.grace)
        self._stop_by = time.monotonic() + self._config.grace
        if self._child is not None:
            self._child.stop(self._config.grace)

    def _force(self) -> int:
        """The second signal: end at once. What was running goes back, with its attempt."""
        logger.warning("Stopping at once.")
        if self._child is not None:
            self._child.kill()
            self._child.wait(KILL_AFTER_SECONDS)
            self._look_after_child()
        return EXIT_FORCED

    def _children(self) -> list[ChildProcess]:
        child = self._child
        return [child] if child is not None else []

    def _wake_child(self) -> None:
        if (child := self._child) is not None:
            child.wake()

    # ---- before the first child

    def _wait_for_database(self) -> bool:
        """Return once the tables can be read; False if a signal came first."""
        session = Session(self._config.database, f"pgqueue start {os.getpid()}")
        outage = Outage(logging.WARNING)
        while not self._signals:
            try:
                with session.round() as connection:
                    claiming.sweep(connection, [])
                outage.over()
                session.close()
                return True
            except psycopg.Error as error:
                session.close()
                self._sleep(LOOK_SECONDS if is_lock_conflict(error) else outage.failed(error))
        return False
