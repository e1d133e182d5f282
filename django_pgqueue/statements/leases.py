"""
Leases: make those of held claims last longer, and take back the jobs of claims that nobody holds any more.

A renewal names each claim by id and version, never by owner: a claim whose COMMIT was never answered
belongs to an owner that does not know of it, and would be renewed for ever. Nothing here waits for a
row lock; what is skipped now is met again at the next tick.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..outcomes import Claim
from ..states import AttemptOutcome
from .bell import ring_for
from .database import Connection, fetch
from .settle import MAX_LAST_ERROR_CHARS, fences

RENEW_SQL = """
WITH held AS MATERIALIZED (
    SELECT id
      FROM django_pgqueue_job
     WHERE id = ANY(%(ids)s::bigint[])
       AND (id::text || ':' || claim_version || ':' || status) = ANY(%(fences)s::text[])
     ORDER BY id
       FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE django_pgqueue_job
   SET lease_until = clock_timestamp() + make_interval(secs => %(lease_seconds)s::float8)
 WHERE id = ANY(ARRAY(SELECT id FROM held))
RETURNING id
"""

# The claims that still stand, as far as a reader sees: a renewal may have skipped a locked row.
STANDING_SQL = """
SELECT id
  FROM django_pgqueue_job
 WHERE id = ANY(%(ids)s::bigint[])
   AND (id::text || ':' || claim_version || ':' || status) = ANY(%(fences)s::text[])
"""

CANCELLED_SQL = """
SELECT id
  FROM django_pgqueue_job
 WHERE id = ANY(%(ids)s::bigint[])
   AND status || '' = 'cancelled'
"""

# Below the reach there are only dead entries, as far as one knows: nobody writes a lease that has ended long ago.
# The condition is checked again under the row's lock, so a renewal that commits first wins. While the server was
# away nobody could renew: after its start, all owners first have a moment to come back.
EXPIRED_SQL = """
SELECT id, claim_version, attempts, max_attempts, task_path, claimed_by
  FROM django_pgqueue_job
 WHERE status = 'running'
   AND lease_until < (SELECT clock_timestamp())
   AND lease_until >= COALESCE((SELECT clock_timestamp()) - make_interval(secs => %(reach)s::float8), '-infinity')
   AND (SELECT pg_postmaster_start_time() + make_interval(secs => %(patience)s::float8) < clock_timestamp())
 ORDER BY lease_until
 LIMIT %(limit)s
   FOR NO KEY UPDATE SKIP LOCKED
"""

OWNED_SQL = """
SELECT id, claim_version, attempts, max_attempts, task_path, claimed_by
  FROM django_pgqueue_job
 WHERE status = 'running'
   AND starts_with(claimed_by, %(owner)s)
   AND NOT (id = ANY(%(held)s::bigint[]))
 ORDER BY lease_until
   FOR NO KEY UPDATE SKIP LOCKED
"""

RECOVER_SQL = f"""
WITH ended AS (
    UPDATE django_pgqueue_job
       SET status = CASE WHEN attempts < max_attempts THEN 'pending' ELSE 'failed' END,
           finished_at = CASE WHEN attempts < max_attempts THEN NULL ELSE clock_timestamp() END,
           available_at = CASE WHEN attempts < max_attempts THEN clock_timestamp()
               + make_interval(secs => (%(delays)s::float8[])[array_position(%(ids)s::bigint[], id)])
               ELSE available_at END,
           claim_version = claim_version + 1,
           lease_until = NULL,
           last_error = %(summary)s
     WHERE id = ANY(%(ids)s::bigint[])
       AND (id::text || ':' || claim_version || ':' || status) = ANY(%(fences)s::text[])
    RETURNING id, claim_version - 1 AS claim_version, attempts, status, claimed_by, claimed_at,
              queue_name, CASE WHEN status = 'pending' THEN available_at END AS available_at
), recorded AS (
    INSERT INTO django_pgqueue_jobattempt (
        job_id, claim_version, attempt, outcome, counted,
        error_class, fingerprint, message, traceback, worker, started_at, ended_at
    )
    SELECT id, claim_version, attempts, %(outcome)s, true,
           %(error_class)s, %(fingerprint)s, %(message)s, '', claimed_by, claimed_at, clock_timestamp()
      FROM ended
), rung AS ({ring_for("ended")})
SELECT id, status, (SELECT count(*) FROM rung) FROM ended
"""


class Running(NamedTuple):
    """A running row that was locked to be taken back."""

    id: int
    claim_version: int
    attempts: int
    max_attempts: int
    task_path: str
    claimed_by: str

    @property
    def claim(self) -> Claim:
        return Claim(self.id, self.claim_version)


class Recovered(NamedTuple):
    id: int
    status: str  # pending, or failed when the attempts are used up


def renew(connection: Connection, claims: Sequence[Claim], lease_seconds: float) -> set[int]:
    """
    Let the leases of *claims* end *lease_seconds* from now, by the database's clock.

    Return the ids that were renewed. One that is missing is locked by someone, or lost: see `standing`.
    """
    parameters = {"ids": [claim.job_id for claim in claims], "fences": fences(claims), "lease_seconds": lease_seconds}
    return {job_id for (job_id,) in fetch(connection, RENEW_SQL, parameters)}


def standing(connection: Connection, claims: Sequence[Claim]) -> set[int]:
    """Return the ids of those of *claims* that still hold."""
    parameters = {"ids": [claim.job_id for claim in claims], "fences": fences(claims)}
    return {job_id for (job_id,) in fetch(connection, STANDING_SQL, parameters)}


def cancelled(connection: Connection, claims: Sequence[Claim]) -> set[int]:
    """Return the ids of those jobs of lost *claims* that someone has cancelled."""
    parameters = {"ids": [claim.job_id for claim in claims]}
    return {job_id for (job_id,) in fetch(connection, CANCELLED_SQL, parameters)}


def lock_expired(
    connection: Connection, limit: int, patience_seconds: float = 0.0, reach_seconds: float | None = None
) -> list[Running]:
    """
    Lock up to *limit* running jobs whose lease has ended, the longest ended first.

    None in the first *patience_seconds* after the start of the server. With *reach_seconds* only those whose
    lease ended no longer ago than that.
    """
    parameters = {"limit": limit, "patience": patience_seconds, "reach": reach_seconds}
    return [Running(*row) for row in fetch(connection, EXPIRED_SQL, parameters)]


def lock_owned(connection: Connection, owner: str, held: Iterable[int]) -> list[Running]:
    """Lock the running jobs claimed under names that begin with *owner*, but for the ids in *held*."""
    return [Running(*row) for row in fetch(connection, OWNED_SQL, {"owner": owner, "held": list(held)})]


def recover(
    connection: Connection,
    jobs: Sequence[Running],
    delays: Sequence[float],
    outcome: AttemptOutcome,
    error_class: str,
    message: str,
) -> list[Recovered]:
    """
    End the claims of *jobs*, locked in this transaction: back to pending after *delays*, or failed.

    The attempts count; each is recorded as *outcome* with *error_class* and *message*.
    """
    if not jobs:
        return []
    claims = [job.claim for job in jobs]
    parameters = {
        "ids": [claim.job_id for claim in claims],
        "fences": fences(claims),
        "delays": list(delays),
        "outcome": outcome.value,
        "error_class": error_class,
        "fingerprint": outcome.value,
        "message": message,
        "summary": message[:MAX_LAST_ERROR_CHARS],
    }
    return [Recovered(job_id, status) for job_id, status, _ in fetch(connection, RECOVER_SQL, parameters)]
