"""A claimed job on its way through a child: from the control loop to a slot, and back."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..exceptions import Interruption, TaskCancelled
from ..outcomes import Claim
from ..statements.claim import ClaimedJob, EarlierAttempt
from .attempt import Attempted
from .interruption import AsyncCode, SyncCode

logger = logging.getLogger("django_pgqueue")


@dataclass(slots=True, eq=False)
class HeldJob:
    """
    A claimed job in this child's hands. *place* is where it stands in the holdings.

    The slot writes *code* and *deadline* when it calls the task, *is_settling* when an atomic one is about to
    commit its own ending, and *attempted* when all is over.
    """

    job: ClaimedJob
    claim: Claim
    earlier: Sequence[EarlierAttempt]
    place: int
    lease_ends: float  # monotonic, if nobody renews it
    lost_for: type[Interruption] | None = None  # set by the control loop when the claim is lost
    code: SyncCode | AsyncCode | None = None
    takes_context: bool = False
    deadline: float = float("inf")  # monotonic
    is_settling: bool = False
    attempted: Attempted | None = None

    @property
    def is_lost(self) -> bool:
        return self.lost_for is not None


def log_lost(claim: Claim, reason: type[Interruption]) -> None:
    """Say that *claim* ended before its task did, for *reason*."""
    extra = {"job_id": claim.job_id}
    if reason is TaskCancelled:
        logger.info("Job %s was cancelled; its task is being ended.", claim.job_id, extra=extra)
    else:
        logger.warning(
            "The claim of job %s (version %s) is lost: its lease ran out, or someone changed the job. "
            "What this attempt does is not recorded.",
            *claim,
            extra=extra,
        )
