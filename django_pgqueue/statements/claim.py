"""
Find the jobs that may run now, and claim some of them.

The jobs of one queue and one priority form a *band*, ordered by ``(available_at, id)``: one exact range
of the pending index. A *sweep* skips through that index from band to band and reads the first row of
each. The claim then visits the bands in the order it is given, and locks in each only what it takes:
the executor pulls lazily, so that nothing is locked beyond the limit, sorted, or joined.

A band has room for a floor, the place below which no live row was seen; there is none yet.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from .database import Connection, fetch


class Band(NamedTuple):
    """
    The pending jobs of one queue and priority. *due_in* is the seconds until its first may run.

    Moments are seconds since 1970 by the database's clock: ``infinity`` is a timestamp, too, and has no datetime.
    """

    queue_name: str
    priority: int
    first_available_at: float
    first_id: int
    due_in: float


class ClaimedJob(NamedTuple):
    """A claimed row, as far as an attempt needs it. *args* and *kwargs* are JSON texts."""

    id: int
    claim_version: int
    backend: str
    queue_name: str
    task_path: str
    args: str
    kwargs: str
    priority: int
    attempts: int
    max_attempts: int
    snoozes: int
    claimed_by: str
    available_at: float  # seconds since 1970
    created_at: datetime
    started_at: datetime
    claimed_at: datetime


# The next band in the order of the index: a lower priority of the same queue, else the next queue's highest.
SWEEP_SQL = """
WITH RECURSIVE band AS (
    (
        SELECT queue_name, priority, available_at, id
          FROM django_pgqueue_job
         WHERE status = 'pending'
         ORDER BY queue_name, priority DESC, available_at, id
         LIMIT 1
    )
    UNION ALL
    SELECT following.*
      FROM band
     CROSS JOIN LATERAL (
        SELECT candidate.*
          FROM (
            (
                SELECT queue_name, priority, available_at, id
                  FROM django_pgqueue_job
                 WHERE status = 'pending'
                   AND queue_name = band.queue_name
                   AND priority < band.priority
                 ORDER BY queue_name, priority DESC, available_at, id
                 LIMIT 1
            )
            UNION ALL
            (
                SELECT queue_name, priority, available_at, id
                  FROM django_pgqueue_job
                 WHERE status = 'pending'
                   AND queue_name > band.queue_name
                 ORDER BY queue_name, priority DESC, available_at, id
                 LIMIT 1
            )
          ) AS candidate
         ORDER BY candidate.queue_name, candidate.priority DESC
         LIMIT 1
     ) AS following
)
SELECT queue_name, priority, EXTRACT(EPOCH FROM available_at)::float8, id,
       (EXTRACT(EPOCH FROM available_at) - EXTRACT(EPOCH FROM clock_timestamp()))::float8
  FROM band
"""

# The same for named queues: a worker of one queue does not walk the bands of thousands of others.
SWEEP_QUEUES_SQL = """
WITH RECURSIVE band AS (
    SELECT first.*
      FROM unnest(%(queue_names)s::text[]) AS wanted(queue_name)
     CROSS JOIN LATERAL (
        SELECT queue_name, priority, available_at, id
          FROM django_pgqueue_job
         WHERE status = 'pending'
           AND queue_name = wanted.queue_name
         ORDER BY queue_name, priority DESC, available_at, id
         LIMIT 1
     ) AS first
    UNION ALL
    SELECT following.*
      FROM band
     CROSS JOIN LATERAL (
        SELECT queue_name, priority, available_at, id
          FROM django_pgqueue_job
         WHERE status = 'pending'
           AND queue_name = band.queue_name
           AND priority < band.priority
         ORDER BY queue_name, priority DESC, available_at, id
         LIMIT 1
     ) AS following
)
SELECT queue_name, priority, EXTRACT(EPOCH FROM available_at)::float8, id,
       (EXTRACT(EPOCH FROM available_at) - EXTRACT(EPOCH FROM clock_timestamp()))::float8
  FROM band
"""

# A volatile function is never an index condition; the clock in a subselect is. It is read once, so that an
# attempt has one beginning: the first start of a job is when it was claimed first, to the microsecond.
# NO KEY UPDATE, so that the foreign keys of attempts do not wait for a claim. The ids go through an array,
# because the planner once turned a join here into a merge over the whole primary key.
CLAIM_SQL = """
WITH moment AS MATERIALIZED (
    SELECT clock_timestamp() AS now
), picked AS MATERIALIZED (
    SELECT job.id
      FROM unnest(%(queue_names)s::text[], %(priorities)s::smallint[]) AS band(queue_name, priority)
     CROSS JOIN LATERAL (
        SELECT id
          FROM django_pgqueue_job
         WHERE status = 'pending'
           AND queue_name = band.queue_name
           AND priority = band.priority
           AND available_at <= (SELECT now FROM moment)
         ORDER BY available_at, id
         LIMIT %(limit)s
           FOR NO KEY UPDATE SKIP LOCKED
     ) AS job
     LIMIT %(limit)s
)
UPDATE django_pgqueue_job
   SET status = 'running',
       attempts = attempts + 1,
       claim_version = claim_version + 1,
       claimed_by = %(owner)s,
       claimed_at = (SELECT now FROM moment),
       lease_until = (SELECT now FROM moment) + make_interval(secs => %(lease_seconds)s::float8),
       started_at = COALESCE(started_at, (SELECT now FROM moment))
 WHERE id = ANY(ARRAY(SELECT id FROM picked))
RETURNING id, claim_version, backend, queue_name, task_path, args::text, kwargs::text, priority,
          attempts, max_attempts, snoozes, claimed_by, EXTRACT(EPOCH FROM available_at)::float8,
          created_at, started_at, claimed_at
"""

# What a retried job's TaskResult shows of its past.
EARLIER_SQL = """
SELECT job_id, worker, error_class, traceback
  FROM django_pgqueue_jobattempt
 WHERE job_id = ANY(%(ids)s::bigint[])
   AND counted
 ORDER BY job_id, claim_version
"""


class EarlierAttempt(NamedTuple):
    """A counted attempt that did not succeed, as far as a TaskResult shows it."""

    worker: str
    error_class: str
    traceback: str


def sweep(connection: Connection, queue_names: Sequence[str] | None = None) -> list[Band]:
    """Return every band with a pending job, due or not, of all queues or of *queue_names*; locks nothing."""
    if queue_names is None:
        return [Band(*row) for row in fetch(connection, SWEEP_SQL, {})]
    return [Band(*row) for row in fetch(connection, SWEEP_QUEUES_SQL, {"queue_names": sorted(set(queue_names))})]


def claim(
    connection: Connection, bands: Sequence[Band], owner: str, limit: int, lease_seconds: float
) -> list[ClaimedJob]:
    """
    Turn up to *limit* due jobs of *bands* to running, for *owner*, with a lease of *lease_seconds*.

    Bands are served in the order given. Fewer jobs than *limit*, or none, means that others are not due
    or are locked at this moment, not that the queue is empty. The jobs come sorted by priority, then
    availability, then id; with others claiming at the same time that is no promise about who runs first.
    """
    if not bands or limit < 1:
        return []
    parameters = {
        "queue_names": [band.queue_name for band in bands],
        "priorities": [band.priority for band in bands],
        "owner": owner,
        "limit": limit,
        "lease_seconds": lease_seconds,
    }
    jobs = [ClaimedJob(*row) for row in fetch(connection, CLAIM_SQL, parameters)]
    # RETURNING promises no order.
    return sorted(jobs, key=lambda job: (-job.priority, job.available_at, job.id))


def due(bands: Sequence[Band]) -> list[Band]:
    """Return those of *bands* whose first job may run now: highest priority first, then longest waiting."""
    return sorted(
        (band for band in bands if band.due_in <= 0),
        key=lambda band: (-band.priority, band.first_available_at, band.first_id),
    )


def next_due_in(bands: Sequence[Band]) -> float | None:
    """Return the seconds until the first job of *bands* that is not due yet becomes so."""
    return min((band.due_in for band in bands if band.due_in > 0), default=None)


def earlier_attempts(connection: Connection, jobs: Sequence[ClaimedJob]) -> dict[int, list[EarlierAttempt]]:
    """Return, by id, the counted attempts that those of *jobs* had before, oldest first."""
    retried = [job.id for job in jobs if job.attempts > 1]
    found: dict[int, list[EarlierAttempt]] = {}
    for job_id, *attempt in fetch(connection, EARLIER_SQL, {"ids": retried}) if retried else ():
        found.setdefault(job_id, []).append(EarlierAttempt(*attempt))
    return found
