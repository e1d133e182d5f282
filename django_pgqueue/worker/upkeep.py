"""
The supervisor's thread that keeps the table right: it renews leases, recovers jobs whose lease has ended,
puts the claims of dead children in order, and deletes old done jobs.

Any number of workers do this at the same time. Nobody is the leader: each statement checks what it
changes under the row's lock.
"""

import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import psycopg

from .. import backoff
from ..exceptions import WorkerCrashed
from ..managers import recover_lost
from ..outcomes import Released, class_path_of
from ..statements import leases, upkeep
from ..statements.database import Connection, fetch, is_lock_conflict
from ..statements.settle import settle
from ..states import AttemptOutcome
from .config import WorkerConfig
from .connection import Outage, Session
from .holdings import Held
from .process import ChildProcess

logger = logging.getLogger("django_pgqueue")

RECOVERY_ROWS = 500
PRUNE_ROWS = 1_000
PRUNE_SLICES = 10  # of one tick
PRUNE_PAUSE_SECONDS = 60.0  # after the whole table was walked
FIRST_BURIAL_PAUSE_SECONDS = 0.1
LONGEST_BURIAL_PAUSE_SECONDS = 5.0
FORGET_WORKERS_SECONDS = 24 * 3600.0

# A dead process's last statement may still be running, and commit.
BACKENDS_SQL = """
SELECT count(*)
  FROM pg_stat_activity
 WHERE application_name = %(name)s
   AND datname = current_database()
"""


class Death(NamedTuple):
    """A child that has ended: under which names it claimed, and what it held."""

    owner: str
    application_name: str
    held: list[Held]
    cause: str
    was_told_to_stop: bool


class Burial:
    """What is left to do about a `Death`: repeated until none of its backends is there."""

    def __init__(self, death: Death, until: float) -> None:
        self.death = death
        self.until = until
        self.next_at = 0.0
        self.pause = FIRST_BURIAL_PAUSE_SECONDS


class Upkeep(threading.Thread):
    """*children* returns those that live now."""

    def __init__(self, config: WorkerConfig, name: str, children: Callable[[], list[ChildProcess]]) -> None:
        super().__init__(name="pgqueue-upkeep", daemon=True)
        self._config = config
        self._worker_name = name
        self._children = children
        self._session = Session(config.database, f"pgqueue upkeep {os.getpid()}")
        self._outage = Outage(logging.WARNING)
        self._alarms: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._deaths: SimpleQueue[Death] = SimpleQueue()
        self._burials: list[Burial] = []
        self._next_tick = 0.0
        self._pruned_up_to = 0
        self._next_prune = 0.0

    def report(self, death: Death) -> None:
        """Have the claims of a dead child put in order."""
        self._deaths.put(death)
        self._alarms.put(None)

    def stop(self, patience: float) -> None:
        """Finish the burials within *patience* seconds, say goodbye, and end."""
        self._stopping = True
        self._alarms.put(None)
        self.join(patience)

    def run(self) -> None:
        while not (self._stopping and self._deaths.empty() and not self._burials):
            pause = self._next_pause()
            if pause > 0:
                self._sleep(pause)
                continue
            try:
                self._work()
                self._outage.over()
            except psycopg.Error as error:
                if not is_lock_conflict(error):
                    self._session.close()
                    self._sleep(self._outage.failed(error))
                else:
                    self._sleep(1.0)
            except Exception:  # a thread begins here, and leases depend on it
                logger.exception("Upkeep failed; trying again.")
                self._session.close()
                self._sleep(1.0)
        self._say_goodbye()
        self._session.close()

    def _sleep(self, seconds: float) -> None:
        with suppress(Empty):
            self._alarms.get(timeout=seconds)

    def _next_pause(self) -> float:
        now = time.monotonic()
        if not self._deaths.empty():
            return 0.0
        moments = [burial.next_at for burial in self._burials]
        if not self._stopping:
            moments.append(self._next_tick)
        return max(min(moments, default=now) - now, 0.0)

    def _work(self) -> None:
        now = time.monotonic()
        while not self._deaths.empty():
            self._burials.append(Burial(self._deaths.get(), until=now + self._config.lease))
        for burial in [burial for burial in self._burials if burial.next_at <= now]:
            self._bury(burial)
        if not self._stopping and now >= self._next_tick:
            self._renew()
            self._recover()
            self._report_worker()
            self._prune()
            self._next_tick = time.monotonic() + self._config.renewal_interval * random.uniform(0.8, 1.0)

    # ---- leases

    def _renew(self) -> None:
        for child in self._children():
            claims = [held.claim for held in child.held()]
            if not claims:
                continue
            with self._session.round() as connection:
                renewed = leases.renew(connection, claims, self._config.lease)
                missing = [claim for claim in claims if claim.job_id not in renewed]
                still_ours = leases.standing(connection, missing) if missing else set()
            lost = [claim for claim in missing if claim.job_id not in still_ours]
            # What has been settled since the list was read is missing, too; the child knows it no more.
            if lost:
                child.tell_lost(lost)

    def _recover(self) -> None:
        while True:
            with self._session.round() as connection:
                recovered = recover_lost(connection, leases.lock_expired(connection, RECOVERY_ROWS))
            if recovered:
                failed = sum(job.status == "failed" for job in recovered)
                logger.warning(
                    "Recovered %d jobs whose lease had ended; %d of them have no attempts left and are failed.",
                    len(recovered),
                    failed,
                )
            if len(recovered) < RECOVERY_ROWS:
                return

    # ---- dead children

    def _bury(self, burial: Burial) -> None:
        death = burial.death
        with self._session.round() as connection:
            backends_left = fetch(connection, BACKENDS_SQL, {"name": death.application_name})[0][0]
            started = {held.claim for held in death.held if held.started}
            jobs = leases.lock_owned(connection, death.owner, ())
            begun = [job for job in jobs if job.claim in started]
            settle(connection, [Released(job.claim) for job in jobs if job.claim not in started])
            if death.was_told_to_stop:
                settle(connection, [Released(job.claim, started=True) for job in begun])
            else:
                _end_as_crashed(connection, begun, death.cause)
        if jobs:
            logger.info(
                "Of a child that ended (%s): %d jobs had started, %d go back untouched.",
                *(death.cause, len(begun), len(jobs) - len(begun)),
            )
        if not backends_left or time.monotonic() > burial.until:
            self._burials.remove(burial)
        else:
            burial.next_at = time.monotonic() + burial.pause
            burial.pause = min(burial.pause * 2, LONGEST_BURIAL_PAUSE_SECONDS)

    # ---- housekeeping

    def _report_worker(self) -> None:
        config = self._config
        with self._session.round() as connection:
            upkeep.report_worker(
                connection, self._worker_name, socket.gethostname(), os.getpid(), str(config.queues), config.concurrency
            )

    def _prune(self) -> None:
        if self._config.retention is None or time.monotonic() < self._next_prune:
            return
        for _ in range(PRUNE_SLICES):
            with self._session.round() as connection:
                pruned = upkeep.prune(connection, self._pruned_up_to, self._config.retention, PRUNE_ROWS)
            if pruned.deleted:
                logger.debug("Deleted %d done jobs.", pruned.deleted)
            if pruned.finished or pruned.last_id is None:
                self._pruned_up_to = 0
                self._next_prune = time.monotonic() + PRUNE_PAUSE_SECONDS * random.uniform(0.5, 1.5)
                return
            self._pruned_up_to = pruned.last_id

    def _say_goodbye(self) -> None:
        try:
            with self._session.round() as connection:
                upkeep.forget_workers(connection, self._worker_name, FORGET_WORKERS_SECONDS)
        except psycopg.Error as error:
            logger.debug("The worker's row could not be removed: %s", error)


def _end_as_crashed(connection: Connection, jobs: list[leases.Running], cause: str) -> None:
    delays = [backoff.default_delay(job.attempts) for job in jobs]
    message = f"The worker process died while it ran this attempt ({cause})."
    ended = leases.recover(connection, jobs, delays, AttemptOutcome.CRASHED, class_path_of(WorkerCrashed), message)
    for job in ended:
        logger.warning("Job %s: its process died (%s); it is %s now.", job.id, cause, job.status)


def cause_of(exit_code: int) -> str:
    """Say how a process ended: its exit code, or the signal by name."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
