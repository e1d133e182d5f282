"""
The supervisor's thread that keeps the table right: it renews leases, recovers jobs whose lease has ended,
puts the claims of dead children in order, and deletes old done jobs.

Any number of workers do this at the same time. Nobody is the leader: each statement checks what it
changes under the row's lock.

It does one small thing at a time, always the most urgent that is due. So neither a long backlog nor
something that fails or is slow keeps leases from being renewed.
"""

import json
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import NamedTuple

import psycopg

from .. import backoff
from ..exceptions import TaskTimeout, WorkerCrashed
from ..managers import recover_lost
from ..outcomes import Claim, Released, class_path_of
from ..statements import leases, upkeep
from ..statements.database import Connection, fetch, is_lock_conflict
from ..statements.settle import settle
from ..states import AttemptOutcome
from .config import WorkerConfig
from .connection import AWAY, Outage, Session
from .holdings import Held
from .process import ChildProcess

logger = logging.getLogger("django_pgqueue")

RECOVERY_ROWS = 500
# After an outage, and after a start: the longest pause between two tries to connect, twice, and a renewal.
RECOVERY_PATIENCE_SECONDS = 15.0
RECOVER_ALL_SECONDS = 60.0  # between two looks at all leases, also those that ended long ago
PRUNE_ROWS = 1_000
SLICE_PAUSE_SECONDS = 0.2  # between two slices, for the jobs' sake
PRUNE_PAUSE_SECONDS = 60.0  # after the whole table was walked
CONFLICT_PAUSE_SECONDS = 1.0
CHECK_PAUSE_SECONDS = 0.1  # between two looks at the claims, however many jobs are cancelled
FIRST_BURIAL_PAUSE_SECONDS = 0.1
LONGEST_BURIAL_PAUSE_SECONDS = 5.0
REPORT_SECONDS = 10.0  # at least as often; `health` counts on it
FORGET_WORKERS_SECONDS = 24 * 3600.0

# A dead process's last statement may still be running, and commit.
BACKENDS_SQL = """
SELECT count(*)
  FROM pg_stat_activity
 WHERE application_name = %(name)s
   AND datname = current_database()
"""

# Rows that someone held when the others were put in order.
LEFT_SQL = """
SELECT count(*)
  FROM django_pgqueue_job
 WHERE status = 'running'
   AND starts_with(claimed_by, %(owner)s)
"""


class Death(NamedTuple):
    """
    A child that has ended at the moment *at*: under which names it claimed, and what it held.

    *is_ours*: it was told to end, or killed because it hung; then its tasks have not ended it.
    """

    owner: str
    application_name: str
    held: list[Held]
    cause: str
    at: float
    is_ours: bool

    @property
    def overstayed(self) -> set[Claim]:
        """The claims whose tasks were over their time."""
        return {held.claim for held in self.held if held.started and 0.0 < held.deadline < self.at}


class Burial:
    """What is left to do about a `Death`: repeated until none of its backends and none of its claims is there."""

    def __init__(self, death: Death, until: float) -> None:
        self.death = death
        self.until = until
        self.next_at = 0.0
        self.pause = FIRST_BURIAL_PAUSE_SECONDS


class Duty:
    """Something to be done again and again. *do* returns the seconds until it is due next."""

    def __init__(self, do: Callable[[], float]) -> None:
        self.do = do
        self.next_at = 0.0
        self.trouble = Outage(logging.WARNING)  # other than that the database is away


class Upkeep(threading.Thread):
    """*children* returns those that live now."""

    def __init__(self, config: WorkerConfig, name: str, children: Callable[[], list[ChildProcess]]) -> None:
        super().__init__(name="pgqueue-upkeep", daemon=True)
        self._config = config
        self._worker_name = name
        self._children = children
        # A renewal that was not answered is broken off, and sent again, before the lease ends.
        self._session = Session(config.database, f"pgqueue upkeep {os.getpid()}", config.renewal_interval / 2)
        self._outage = Outage(logging.WARNING)
        self._alarms: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._deaths: SimpleQueue[Death] = SimpleQueue()
        self._burials: list[Burial] = []
        self._renewed_at = time.monotonic()
        self._turned_at = time.monotonic()  # the moment before the first child's first turn
        self._is_away = False
        self._back_at = float("-inf")  # monotonic; when the last outage was over
        self._recovered_at = self._recovered_all_at = float("-inf")  # monotonic
        self._pruned_up_to = 0
        self._was_told_to_check = False
        self._checked_at = 0.0
        self._checking = Duty(self._check_claims)
        self._burying = Duty(self._bury_one)
        # The most urgent first.
        others = map(Duty, (self._recover, self._report_worker, self._prune))
        self._duties = [Duty(self._renew), self._checking, self._burying, *others]

    @property
    def session(self) -> Session:
        """For the watchdog."""
        return self._session

    def report(self, death: Death) -> None:
        """Have the claims of a dead child put in order."""
        self._deaths.put(death)
        self._alarms.put(None)

    def check_claims(self) -> None:
        """Look soon whether the claims of the children still hold: running jobs were cancelled. From any thread."""
        self._was_told_to_check = True
        self._alarms.put(None)

    def stop(self, patience: float) -> None:
        """Finish the burials within *patience* seconds, say goodbye, and end."""
        self._stopping = True
        self._alarms.put(None)
        self.join(patience)

    def run(self) -> None:
        self._back_at = time.monotonic()  # there may just have been one, and others are on their way back
        while not (self._stopping and self._deaths.empty() and not self._burials):
            while not self._deaths.empty():
                self._burials.append(Burial(self._deaths.get(), until=time.monotonic() + self._config.lease))
                self._burying.next_at = 0.0
            if self._was_told_to_check:
                self._was_told_to_check = False
                self._checking.next_at = min(self._checking.next_at, self._checked_at + CHECK_PAUSE_SECONDS)
            duties = [self._burying] if self._stopping else self._duties
            now = time.monotonic()
            due = next((duty for duty in duties if duty.next_at <= now), None)
            if due is not None:
                self._do(due)
            else:
                self._sleep(min(duty.next_at for duty in duties) - now)
        self._say_goodbye()
        self._session.close()

    def _do(self, duty: Duty) -> None:
        try:
            pause = duty.do()
            duty.trouble.over()
        except AWAY as error:
            if is_lock_conflict(error):
                pause = min(CONFLICT_PAUSE_SECONDS, self._config.renewal_interval / 2)
            else:  # then nothing else can be done, either
                self._is_away = True
                self._session.close()
                self._sleep(min(self._outage.failed(error), self._config.renewal_interval))
                return
        except Exception as error:  # a thread begins here; the other duties are done all the same
            self._session.close()
            pause = duty.trouble.failed(error)
        duty.next_at = time.monotonic() + pause

    def _sleep(self, seconds: float) -> None:
        with suppress(Empty):
            self._alarms.get(timeout=seconds)

    def _interval(self) -> float:
        return self._config.renewal_interval * random.uniform(0.8, 1.0)

    @contextmanager
    def _answered(self, transaction: AbstractContextManager[Connection]) -> Iterator[Connection]:
        with transaction as connection:
            yield connection
        self._outage.over()
        if self._is_away:
            self._is_away = False
            self._back_at = time.monotonic()
            self._recovered_all_at = float("-inf")

    def _round(self) -> AbstractContextManager[Connection]:
        return self._answered(self._session.round())

    def _single(self) -> AbstractContextManager[Connection]:
        """For one statement."""
        return self._answered(self._session.single())

    # ---- leases

    def _renew(self) -> float:
        for child in self._children():
            claims, superseded = _newest([held.claim for held in child.held()])
            # One that is stopped does no work; others shall do it when its leases have ended.
            if not claims or child.is_stopped():
                continue
            until = time.monotonic() + self._config.lease
            with self._round() as connection:
                renewed = leases.renew(connection, claims, self._config.lease)
                missing = [claim for claim in claims if claim.job_id not in renewed]
                some_are_locked = self._tell_lost(connection, child, missing, superseded)
            if not some_are_locked:
                child.note_renewal(until)
        self._renewed_at = time.monotonic()
        return self._interval()

    def _check_claims(self) -> float:
        """As a renewal does, but only reading: every worker is told whenever running jobs are cancelled somewhere."""
        self._checked_at = time.monotonic()
        for child in self._children():
            claims, superseded = _newest([held.claim for held in child.held()])
            if not claims:
                continue
            with self._round() as connection:
                self._tell_lost(connection, child, claims, superseded)
        return float("inf")  # until the next word

    def _tell_lost(
        self, connection: Connection, child: ChildProcess, claims: list[Claim], superseded: list[Claim]
    ) -> bool:
        """Tell *child* which of *claims* do not hold any more, and that *superseded* do not; whether the others do."""
        still_ours = leases.standing(connection, claims) if claims else set()
        # What has been settled since the list was read is missing, too; the child knows it no more.
        if lost := superseded + [claim for claim in claims if claim.job_id not in still_ours]:
            cancelled = leases.cancelled(connection, lost)
            child.tell_lost([claim for claim in lost if claim.job_id not in cancelled])
            child.tell_lost([claim for claim in lost if claim.job_id in cancelled], by_cancellation=True)
        return bool(still_ours)

    def _recover(self) -> float:
        patience = min(self._config.lease, RECOVERY_PATIENCE_SECONDS)
        if time.monotonic() - self._renewed_at > self._config.renewal_interval * 1.5:
            return SLICE_PAUSE_SECONDS  # after an outage, our own leases may have ended, and are renewed first
        if self._is_away:  # the first question after an outage is only whether it is over
            with self._round():
                pass
        if (waited := time.monotonic() - self._back_at) < patience:
            return patience - waited  # and so may those of other workers, which come back when they do
        began = time.monotonic()
        # Leases that had ended at the last look were recovered then, or locked; a later one ended later.
        is_for_all = began - self._recovered_all_at > RECOVER_ALL_SECONDS
        reach = None if is_for_all else began - self._recovered_at + self._config.lease
        with self._single() as connection:  # most of the time there is nothing to do
            has_any = bool(leases.lock_expired(connection, 1, patience, reach))
        recovered: list[leases.Recovered] = []
        if has_any:
            with self._round() as connection:
                jobs = leases.lock_expired(connection, RECOVERY_ROWS, patience, reach)
                recovered = recover_lost(connection, jobs, self._config.constant_delay)
        if len(recovered) < RECOVERY_ROWS:
            self._recovered_at = began
            self._recovered_all_at = began if is_for_all else self._recovered_all_at
        if recovered:
            failed = sum(job.status == "failed" for job in recovered)
            logger.warning(
                "Recovered %d jobs whose lease had ended; %d of them have no attempts left and are failed.",
                len(recovered),
                failed,
            )
        return SLICE_PAUSE_SECONDS if len(recovered) == RECOVERY_ROWS else self._interval()

    # ---- dead children

    def _bury_one(self) -> float:
        now = time.monotonic()
        self._burials = [burial for burial in self._burials if burial.until > now]  # else the leases have ended
        if not self._burials:
            return LONGEST_BURIAL_PAUSE_SECONDS
        burial = min(self._burials, key=lambda burial: burial.next_at)
        if burial.next_at <= now:
            burial.next_at = now + burial.pause  # also if it fails: the others have their turn
            burial.pause = min(burial.pause * 2, LONGEST_BURIAL_PAUSE_SECONDS)
            if self._bury(burial.death):
                self._burials.remove(burial)
        return max(min((burial.next_at for burial in self._burials), default=now) - time.monotonic(), 0.0)

    def _bury(self, death: Death) -> bool:
        """Put in order what can be at this moment; whether that was all."""
        with self._round() as connection:
            # Asked first: what a backend has committed before it went is seen by the statements that follow.
            backends_left = fetch(connection, BACKENDS_SQL, {"name": death.application_name})[0][0]
            started = {held.claim for held in death.held if held.started}
            finished = {held.claim for held in death.held if held.finished}
            jobs = leases.lock_owned(connection, death.owner, ())
            begun = [job for job in jobs if job.claim in started]
            late = [job for job in begun if job.claim in death.overstayed]
            others = [job for job in begun if job.claim not in death.overstayed]
            # Those that had finished run again, nobody knows with what end. They have not ended the process.
            given_back = [job for job in jobs if job.claim in finished] + (others if death.is_ours else [])
            settle(connection, [Released(job.claim) for job in jobs if job.claim not in started | finished])
            settle(connection, [Released(job.claim, started=True) for job in given_back])
            _end_as_timed_out(connection, late, self._config.constant_delay)
            if not death.is_ours:
                _end_as_crashed(connection, others, death.cause, self._config.constant_delay)
            claims_left = fetch(connection, LEFT_SQL, {"owner": death.owner})[0][0]
        if jobs:
            logger.info(
                "Of a child that ended (%s): %d jobs were running, %d go back.",
                *(death.cause, len(begun), len(jobs) - len(begun)),
            )
        return not backends_left and not claims_left

    # ---- housekeeping

    def _report_worker(self) -> float:
        config = self._config
        report = upkeep.WorkerReport(
            name=self._worker_name,
            hostname=socket.gethostname(),
            process_id=os.getpid(),
            backend=config.backend,
            queues=str(config.queues),
            serves=json.dumps(asdict(config.queues)),
            concurrency=config.slots,
            turned_for=time.monotonic() - self._last_turn(),
        )
        with self._single() as connection:
            upkeep.report_worker(connection, report)
        return min(self._interval(), REPORT_SECONDS)

    def _last_turn(self) -> float:
        """
        When the slowest control loop last turned and the database did what was asked, by the monotonic clock.

        While a child is missing, or has not turned yet, the moment stands still.
        """
        turns = [child.vitals().worked for child in self._children()]
        if len(turns) >= (1 if self._config.burst else self._config.processes):
            self._turned_at = max(self._turned_at, min(turns))
        return self._turned_at

    def _prune(self) -> float:
        if self._config.retention is None:
            return PRUNE_PAUSE_SECONDS
        with self._single() as connection:
            pruned = upkeep.prune(connection, self._pruned_up_to, self._config.retention, PRUNE_ROWS)
        if pruned.deleted:
            logger.debug("Deleted %d done jobs.", pruned.deleted)
        if pruned.finished or pruned.last_id is None:
            self._pruned_up_to = 0
            return PRUNE_PAUSE_SECONDS * random.uniform(0.5, 1.5)
        self._pruned_up_to = pruned.last_id
        return SLICE_PAUSE_SECONDS

    def _say_goodbye(self) -> None:
        try:
            with self._round() as connection:
                upkeep.forget_workers(connection, self._worker_name, FORGET_WORKERS_SECONDS)
        except psycopg.Error as error:
            logger.debug("The worker's row could not be removed: %s", error)


def _newest(claims: list[Claim]) -> tuple[list[Claim], list[Claim]]:
    """
    Return of each job the newest of *claims*, and the others.

    A child that has lost a claim and taken the same job again may hold both. The older one is lost.
    """
    newest: dict[int, Claim] = {}
    for claim in sorted(claims):
        newest[claim.job_id] = claim
    return list(newest.values()), [claim for claim in claims if newest[claim.job_id] != claim]


def _end_as_timed_out(connection: Connection, jobs: list[leases.Running], constant_delay: float | None) -> None:
    delays = [backoff.delay_after_loss(constant_delay, job.attempts) for job in jobs]
    message = "The task ran for longer than its timeout, and ended only with its process."
    for job in leases.recover(connection, jobs, delays, AttemptOutcome.TIMEOUT, class_path_of(TaskTimeout), message):
        logger.warning("Job %s: its task could only be ended with its process; it is %s now.", job.id, job.status)


def _end_as_crashed(
    connection: Connection, jobs: list[leases.Running], cause: str, constant_delay: float | None
) -> None:
    delays = [backoff.delay_after_loss(constant_delay, job.attempts) for job in jobs]
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
