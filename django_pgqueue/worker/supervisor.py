"""
The process that a person starts: it keeps children running, passes signals on, and runs no task itself.

The main thread does nothing but watch: signals, and what children say or their death, wake it. Everything that talks to
the database happens in `Upkeep` and `Listener`, so that a database that does not answer delays no signal.
"""

import logging
import os
import random
import secrets
import socket
import time

import psycopg

from ..statements import claim as claiming
from ..statements.database import is_lock_conflict
from .config import WorkerConfig
from .connection import Outage, Session
from .listener import Listener
from .place import KILL_AFTER_SECONDS, MAX_EARLY_DEATHS, Place
from .process import ChildProcess
from .signals import EXIT_FORCED, Signals, bury_orphans
from .upkeep import Upkeep
from .watchdog import Watchdog

logger = logging.getLogger("django_pgqueue")

LOOK_SECONDS = 1.0
BURIAL_PATIENCE_SECONDS = 5.0

EXIT_OK = 0
EXIT_CHILD_CANNOT_START = 1


class Supervisor:
    """Run one worker. *signals* may be watched already. Belongs in the main thread."""

    def __init__(self, config: WorkerConfig, signals: Signals | None = None) -> None:
        self._config = config
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"[:200]
        self._signals = signals or Signals()
        self._stop_by: float | None = None
        self._upkeep = Upkeep(config, self._name, self._children)
        self._listener = Listener(
            config, self._children, self._wake_one, self._have_one_resting_look, self._upkeep.check_claims
        )
        self._session = Session(config.database, f"pgqueue start {os.getpid()}")
        self._watchdog = Watchdog([self._session, self._upkeep.session, *self._listener.sessions])
        self._look_at = 0.0  # monotonic; when to have the next child look for jobs
        self._places = [Place(config, self._upkeep.report) for _ in range(config.processes)]

    def run(self) -> int:
        """Work until told to stop, or in burst mode until nothing is left; return the process's exit code."""
        self._signals.watch()
        logger.info(
            "Worker %s starts: queues %s, %d slots in %d processes, database %r.",
            *(os.getpid(), self._config.queues, self._config.slots, self._config.processes, self._config.database),
        )
        self._watchdog.start()
        try:
            if not self._wait_for_database():
                return EXIT_OK
            self._upkeep.start()
            self._listener.start()
            try:
                code = self._supervise()
            finally:
                self._listener.stop()
                self._upkeep.stop(BURIAL_PATIENCE_SECONDS)
        finally:
            self._watchdog.stop()
        logger.info("Worker %s ends.", os.getpid())
        return code

    # ---- the children

    def _supervise(self) -> int:
        self._signals.are_heeded = True
        while True:
            if self._signals.count and self._stop_by is None:
                self._begin_stop("Stopping: no more jobs are claimed, running ones have %g s.", self._config.grace)
            if self._signals.count > 1:
                return self._force()
            for place in self._places:
                self._look_at_place(place)
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + self._config.poll * random.uniform(0.8, 1.2)
                self._have_one_look()
            bury_orphans([child.pid for child in self._children()])
            if self._stop_by is None and any(place.gave_up for place in self._places):
                self._begin_stop("A child died %d times before it could start; giving up.", MAX_EARLY_DEATHS)
            if all(place.is_over for place in self._places):
                return EXIT_CHILD_CANNOT_START if any(place.gave_up for place in self._places) else EXIT_OK
            if self._stop_by is not None and time.monotonic() > self._stop_by + KILL_AFTER_SECONDS:
                logger.warning("A child has not ended in its grace period and is killed.")
                self._kill_all()
                continue
            self._sleep(self._pause())

    def _look_at_place(self, place: Place) -> None:
        child = place.child
        said = place.look()
        has_died = child is not None and place.child is not child
        # A dead child may have been told of jobs, and have looked for none.
        if has_died:
            self._wake_one(but_not=place.child)
        elif said.has_more_jobs:  # perhaps: it could not take more
            self._wake_one(but_not=place.child, is_sure=False)
        if said.has_more_jobs or said.rests or has_died:
            self._listener.something_happened(more_jobs=said.has_more_jobs or has_died)

    def _pause(self) -> float:
        restarts = [place.restart_at for place in self._places if place.child is None and not place.is_over]
        return min(LOOK_SECONDS, max(min([*restarts, self._look_at]) - time.monotonic(), 0.0))

    def _begin_stop(self, reason: str, *values: float) -> None:
        logger.log(logging.INFO if self._signals.count else logging.ERROR, reason, *values)
        self._stop_by = time.monotonic() + self._config.grace
        self._listener.retire()
        for place in self._places:
            place.stop(self._config.grace)

    def _force(self) -> int:
        """The second signal: end at once. What was running goes back, with its attempt."""
        logger.warning("Stopping at once.")
        self._kill_all()
        return EXIT_FORCED

    def _kill_all(self) -> None:
        for place in self._places:
            place.kill()

    def _sleep(self, seconds: float) -> None:
        self._signals.sleep(seconds, [child.voice for child in self._children()])

    def _children(self) -> list[ChildProcess]:
        return [child for place in self._places if (child := place.child) is not None]

    def _wake_one(self, but_not: ChildProcess | None = None, *, is_sure: bool = True) -> None:
        """
        Wake the child with the most free slots, to claim if it is *sure* that there is a job, else to look first.
        Called by the listener's thread, too.

        One is enough: if it finds more jobs than it can take, it says so, and the next is woken. When none
        has a free slot, all are told, so that they look as soon as they have one.
        """
        children = [child for child in self._children() if child is not but_not]
        if len(children) > 1:
            free = {child: self._config.concurrency - child.held_count() for child in children}
            # Of equals the one that has looked longest ago: looks have their price, and a limit for each child.
            idlest = max(children, key=lambda child: (free[child], -child.vitals().rested))
            children = [idlest] if free[idlest] > 0 else children
        for child in children:
            if is_sure:
                child.wake()
            else:
                child.tell_of_more()

    def _have_one_resting_look(self) -> None:
        """Let the child look, by a claim, that has last found nothing to do. Called by the listener's thread."""
        resting = {child: child.vitals().rested for child in self._children() if not child.was_told_to_stop}
        latest = max(resting, key=resting.__getitem__, default=None)
        if latest is not None and resting[latest]:
            latest.wake()

    def _have_one_look(self) -> None:
        """
        Let one child with a free slot look for jobs, since a notification may have been lost.

        One after the other has its turn: the one with the most free slots may be the one that hangs.
        """
        for _ in self._places:
            self._places.append(self._places.pop(0))
            child = self._places[-1].child
            if child is not None and child.held_count() < self._config.concurrency:
                child.look()
                return

    # ---- before the first child

    def _wait_for_database(self) -> bool:
        """Return once the tables can be read; False if a signal came first."""
        outage = Outage(logging.WARNING)
        while not self._signals.count:
            try:
                with self._session.round() as connection:
                    claiming.sweep(connection, [])
                outage.over()
                self._session.close()
                return True
            except psycopg.Error as error:
                self._session.close()
                self._sleep(LOOK_SECONDS if is_lock_conflict(error) else outage.failed(error))
        return False
