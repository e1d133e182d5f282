"""
The part of a child's control loop that finds jobs: when to look for them, where, and what it makes of the answer.

Most claims know where to begin (`Floors`) and are one statement. One that comes back with fewer jobs than asked is
followed by a look, at once or as soon as looks are affordable, and by another claim if that has found anything.
Only then is nothing left to do until the next job is due or someone says that there is one: the supervisor, which
hears of notifications and sees to it that somebody looks every poll interval.
"""

import random
import time

import psycopg

from ..statements import claim as claiming
from .config import WorkerConfig
from .floors import Floors

# Unasked, in case that the supervisor always asks another child. It asks far more often.
LOOK_UNASKED_SECONDS = 10.0


class Claimer:
    """
    *at* is when to claim next, by the monotonic clock. *is_drained*: nothing was left that may run now.

    *rests_since* is the moment before the last look that has left nothing to do, zero if more was wanted of late
    and all of it was found; *found_at* the moment before the last one that has found a job.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.at = 0.0
        self.rests_since = 0.0
        self.found_at = 0.0
        self.is_drained = False
        self.lease_ends = 0.0  # monotonic; of the claims made last, if they are not renewed
        self._config = config
        self._floors = Floors(config.queues, config.processes)
        self._was_woken = False
        self._was_asked = False
        self._is_behind_s_turn = False
        self._was_filled = False  # the last claim
        self._will_look = False  # next time, before it claims again
        self._owes_look = False  # it was woken instead: a steady stream of jobs would keep it from looking

    def wake(self) -> None:
        """Claim next time: there may be a job. From any thread."""
        # A flag: a round that is under way will set the time of the next claim, and has not seen this job.
        self._was_woken = True

    def ask(self, *, is_poll: bool) -> None:
        """Look next time whether there is a job: a new one, or if it is a poll an old one that was never met."""
        self._was_asked = True
        self._owes_look = self._owes_look or not is_poll

    def expect_jobs(self, at: float = 0.0) -> None:
        """There is, or will be at the monotonic moment *at*, a job that no look has seen."""
        self.is_drained = False
        self.at = min(self.at, at)

    def not_before(self, at: float) -> None:
        self.at = max(self.at, at)

    def is_due(self, now: float) -> bool:
        """Whether to claim at the moment *now*. Takes note of who has called."""
        if self._was_woken:
            self._owes_look = self._owes_look or self._will_look
            self._was_woken = self._was_asked = self._will_look = False
            self.at = 0.0
        return self._was_asked or now >= self.at

    def can_peek(self) -> bool:
        """Whether to look first if a claim is worth it: nobody has said that there is a job, or a look is overdue."""
        is_only_asked = self._was_asked and time.monotonic() < self.at
        return self.has_to_peek or ((is_only_asked or self._will_look) and self._floors.may_look())

    @property
    def has_to_peek(self) -> bool:
        """Whether it was woken so often that it did not come to look for long."""
        return self._owes_look and self._floors.must_look()

    def peek(self, connection: psycopg.Connection) -> bool:
        """Look, in one statement; whether a job may run now."""
        began = time.monotonic()
        # Behind is no job that it was woken for, nor what a claim that was filled has left.
        is_owed = self._owes_look or self._will_look
        self._is_behind_s_turn = not (self._is_behind_s_turn or is_owed) and self._floors.has_behind
        self._was_asked = self._will_look = self._owes_look = False
        if self._is_behind_s_turn:
            has_found = self._floors.look_behind(connection)
        else:
            self._floors.look(connection, everywhere=self._config.burst)
            has_found = self._floors.any_due()
            self.is_drained = not has_found
        if has_found:
            self.at = 0.0
        else:
            self._was_filled = False
            self._rest(self.rests_since if self._is_behind_s_turn else began)
        return has_found

    def claim(self, connection: psycopg.Connection, owner: str, wanted: int) -> list[claiming.ClaimedJob]:
        """Claim up to *wanted* jobs for *owner*, and decide when to claim next."""
        floors = self._floors
        self._was_asked = self._will_look = False
        began = time.monotonic()
        self.lease_ends = began + self._config.lease
        jobs = self._claim(connection, owner, wanted)
        has_looked = not jobs and floors.may_look()
        if has_looked:
            self._owes_look = False
            floors.look(connection, everywhere=self._config.burst)
            jobs = self._claim(connection, owner, wanted) if floors.any_due() else []
        elif len(jobs) == wanted and self._was_filled and floors.must_look():
            floors.look(connection)
        if jobs:
            self.found_at = began
        was_filled, self._was_filled = self._was_filled, len(jobs) == wanted
        if self._was_filled:
            self.rests_since = 0.0
        if floors.look_behind(connection) or (was_filled and self._was_filled):
            self.at = 0.0
        elif self._was_filled:
            # Perhaps there were just as many. A look says so, if there may be one soon.
            self.at = floors.look_soon_at
            self._will_look = True
        elif has_looked and not jobs:
            self.is_drained = not floors.any_due()
            self._rest(began)
        else:
            # They begin, and perhaps end, before it looks for more, and for what they have hidden.
            self.at = floors.look_later_at
            self._will_look = True
        return jobs

    def _claim(self, connection: psycopg.Connection, owner: str, wanted: int) -> list[claiming.ClaimedJob]:
        began = time.monotonic()
        jobs = claiming.claim(connection, self._floors.bands(), owner, wanted, self._config.lease)
        self._floors.claimed(jobs, wanted, time.monotonic() - began)
        return jobs

    def failed(self) -> None:
        """What the last claim has found was rolled back with it, or is in doubt."""
        self.at = 0.0
        self.is_drained = False

    def _rest(self, since: float) -> None:
        """Nothing more can be had now: jobs may be locked by others or not due."""
        self.rests_since = since
        by_itself = self._config.poll
        if not self._config.burst and not self._floors.any_due():
            by_itself = max(by_itself, LOOK_UNASKED_SECONDS)
        self.at = time.monotonic() + min(by_itself * random.uniform(0.8, 1.2), self._floors.next_due_in())
