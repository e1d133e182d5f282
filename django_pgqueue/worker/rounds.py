"""
A round: what a control loop asks of the database at a time. Settle what has arrived, claim what is wanted, one commit.

While the server works on one round there is time for what the last one calls for. So in full swing, when large rounds
follow each other, the two go side by side.
"""

import logging
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

import psycopg

from ..outcomes import Claim, Released
from ..statements import claim as claiming
from ..statements import leases
from ..statements.database import is_lock_conflict, is_refusal
from ..statements.settle import Settlement, settle
from .claimer import Claimer
from .connection import Outage, Session
from .naming import OwnerNames
from .settler import BUSY_PAUSE_SECONDS, Settler

logger = logging.getLogger("django_pgqueue")


class Round(NamedTuple):
    """
    What a round came to, committed: how claims have ended, and the jobs *claimed*, of as many as were *wanted*.

    *lease_ends* is until when those are certainly ours, by the monotonic clock, if nobody renews them.
    """

    settlement: Settlement
    wanted: int
    claimed: list[claiming.ClaimedJob]
    earlier: dict[int, list[claiming.EarlierAttempt]]  # their attempts before this one, by the job's id
    lease_ends: float


class Rounds:
    """For the control loop, on its *session*."""

    def __init__(self, session: Session, settler: Settler, claimer: Claimer, names: OwnerNames) -> None:
        self._session = session
        self._settler = settler
        self._claimer = claimer
        self._names = names
        self._outage = Outage(logging.DEBUG)

    @property
    def begins_with_settling(self) -> bool:
        """Whether what is to be settled would be the first that a round sends, but for its BEGIN."""
        only_ready = len(self._settler) == self._settler.ready > 0
        return only_ready and not self._claimer.has_to_peek and not self._names.has_old

    def do(self, wanted: int, held: Iterable[Claim], meanwhile: Callable[[], None]) -> Round:
        """
        Settle what has arrived, claim what is wanted: in one transaction, or in none if it is one statement.

        *held* are all the claims that the caller knows of. *meanwhile* is called when the first statement that
        settles has been sent, or not at all; the caller sees to that. Raises what the database raises, and
        `recover_from` is next: nothing is lost, whatever has been committed.
        """
        done = self._do(wanted, held, meanwhile)
        self._outage.over()
        self._names.answered()
        return done

    def _do(self, wanted: int, held: Iterable[Claim], meanwhile: Callable[[], None]) -> Round:
        settler, claimer = self._settler, self._claimer
        ready = settler.ready
        claimed: list[claiming.ClaimedJob] = []
        earlier: dict[int, list[claiming.EarlierAttempt]] = {}
        is_more = self._names.has_old or (ready and wanted) or ready > 1
        if (wanted and claimer.has_to_peek) or (not is_more and not ready and claimer.can_peek()):
            with self._session.single() as connection:
                if not claimer.peek(connection):
                    return Round(Settlement(), wanted, [], {}, 0.0)
        try:
            with self._session.round() if is_more else self._session.single() as connection:
                self._release_old(connection, held)
                with connection.meanwhile(meanwhile):
                    settlement = settler.write(connection)
                if wanted:
                    self._names.claiming()
                    claimed = claimer.claim(connection, self._names.current, wanted)
                    earlier = claiming.earlier_attempts(connection, claimed)
        except (psycopg.Error, UnicodeEncodeError) as error:
            settler.failed()
            claimer.failed()
            if not is_more:
                self._names.lost_touch()  # what was claimed before is committed, and goes back
            if not ready or not (is_lock_conflict(error) or is_refusal(error)):
                raise
            meanwhile()  # that takes long
            # One row must not keep the others; claiming waits for the next turn.
            return Round(settler.write_carefully(), wanted, [], {}, 0.0)
        settler.done(settlement)
        return Round(settlement, wanted, claimed, earlier, claimer.lease_ends)

    def _release_old(self, connection: psycopg.Connection, held: Iterable[Claim]) -> None:
        for name in self._names.old():
            # Names that begin with this one are locked, too: 1 is the beginning of 10.
            owned = leases.lock_owned(connection, name, [claim.job_id for claim in held])
            jobs = [job for job in owned if job.claimed_by == name]
            if jobs:
                settle(connection, [Released(job.claim) for job in jobs])
                logger.info("Released %d jobs whose claim was never confirmed.", len(jobs))

    def recover_from(self, error: psycopg.Error) -> float:
        """Get ready for another try after *error*; return the seconds to pause."""
        self._claimer.failed()  # a look may have, before anything else
        if is_lock_conflict(error):  # rolled back, for certain
            self._names.answered()
            return BUSY_PAUSE_SECONDS * random.uniform(0.8, 1.2)
        self._names.lost_touch()
        self._session.close()
        return self._outage.failed(error)
