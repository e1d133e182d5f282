"""
Find the jobs that may run now, and claim some of them.

The jobs of one queue and one priority form a *band*, ordered by ``(available_at, id)``: one exact range
of the pending index. A *sweep* skips through that index from band to band and reads the first row of
each. The claim then visits the bands in the order it is given, and locks in each only what it takes:
the executor pulls lazily, so that nothing is locked beyond the limit, sorted, or joined.

While a long transaction keeps vacuum from working, the entries of jobs that have ended stay in the index,
and whoever comes by walks over them. So a band has a *floor*, the place below which no pending job was seen:
a claim begins there. And whoever knows bands already can sweep what lies between them, and parts of them.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from ..outcomes import Claim
from .database import Connection, fetch

PRIORITY_BOUND = 2**15 + 1  # beyond what the column can hold


class Band(NamedTuple):
    """
    The pending jobs of one queue and priority. *due_in* is the seconds until its first may run.

    A claim begins at its floor, *floor_at* and *floor_id*; nothing depends on that being right but how much is
    found. Moments are seconds since 1970 by the database's clock: ``infinity`` is a timestamp, too, and has no
    datetime.
    """

    queue_name: str
    priority: int
    first_available_at: float
    first_id: int
    due_in: float
    floor_at: float = float("-inf")
    floor_id: int = 0


class Part(NamedTuple):
    """What to look at of a known band: jobs available *since* then, *until* then, both included."""

    queue_name: str
    priority: int
    since: float = float("-inf")
    until: float = float("inf")


class Sweep(NamedTuple):
    """The first pending job of each band, of those known in the part that was looked at, and the database's *clock*."""

    bands: list[Band]
    clock: float


class ClaimedJob(NamedTuple):
    """A claimed row, as far as an attempt needs it. *args* and *kwargs* are JSON texts; moments are as in `Band`."""

    claim: Claim
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
    available_at: float
    created_at: float
    started_at: float
    claimed_at: float

    @property
    def id(self) -> int:
        return self.claim.job_id

    @property
    def claim_version(self) -> int:
        return self.claim.version


def _first(condition: str) -> str:
    return f"""
        SELECT queue_name, priority, available_at, id
          FROM django_pgqueue_job
         WHERE status = 'pending'
           AND {condition}
         ORDER BY queue_name, priority DESC, available_at, id
         LIMIT 1"""


# The first job of each known band, in a part of it. Here and below arrays are hidden in subselects: a planner that
# sees how short they are finds each look cheaper than looks in general, and plans it anew, which takes longer than it.
_KNOWN_SQL = """
SELECT known.queue_name, known.priority, first.available_at, first.id
  FROM unnest(
           (SELECT %(queue_names)s::text[]), (SELECT %(priorities)s::smallint[]),
           (SELECT %(since)s::float8[]), (SELECT %(until)s::float8[])
       ) AS known(queue_name, priority, since, until)
 CROSS JOIN LATERAL (
        SELECT available_at, id
          FROM django_pgqueue_job
         WHERE status = 'pending'
           AND queue_name = known.queue_name
           AND priority = known.priority
           AND available_at BETWEEN to_timestamp(known.since) AND to_timestamp(known.until)
         ORDER BY available_at, id
         LIMIT 1
     ) AS first
"""

# Unknown bands of queues that are named: above, between and below the known ones.
_WITHIN_SQL = f"""
within AS (
    SELECT first.*, gap.above
      FROM unnest(
               (SELECT %(gap_queues)s::text[]), (SELECT %(gap_below)s::int[]), (SELECT %(gap_above)s::int[])
           ) AS gap(queue_name, below, above)
     CROSS JOIN LATERAL ({_first("queue_name = gap.queue_name AND priority < gap.below AND priority > gap.above")}
     ) AS first
    UNION ALL
    SELECT following.*, band.above
      FROM within AS band
     CROSS JOIN LATERAL ({_first("queue_name = band.queue_name AND priority < band.priority AND priority > band.above")}
     ) AS following
)
"""

# All bands of queues that are not named: before, between and behind those that are, by the database's own order.
# The next band is a lower priority of the same queue, else the next queue's highest. "Behind the last" is a
# question of its own, because no text is greater than every other.
_OUTSIDE_SQL = f"""
outside AS (
    SELECT first.*, gap.before
      FROM (
        SELECT COALESCE(lag(name) OVER (ORDER BY name), '') AS after, name AS before
          FROM unnest((SELECT %(skipped)s::text[])) AS name
        UNION ALL
        SELECT COALESCE(max(name), ''), NULL
          FROM unnest((SELECT %(skipped)s::text[])) AS name
      ) AS gap
     CROSS JOIN LATERAL (
        ({_first("queue_name > gap.after AND queue_name < gap.before")})
        UNION ALL
        ({_first("queue_name > gap.after AND gap.before IS NULL")})
     ) AS first
    UNION ALL
    SELECT following.*, band.before
      FROM outside AS band
     CROSS JOIN LATERAL (
        SELECT candidate.*
          FROM (
            ({_first("queue_name = band.queue_name AND priority < band.priority")})
            UNION ALL
            ({_first("queue_name > band.queue_name AND queue_name < band.before")})
            UNION ALL
            ({_first("queue_name > band.queue_name AND band.before IS NULL")})
          ) AS candidate
         ORDER BY candidate.queue_name, candidate.priority DESC
         LIMIT 1
     ) AS following
)
"""

_FOUND_SQL = """
SELECT queue_name, priority, date_part('epoch', available_at), id FROM ({found}) AS found
UNION ALL
SELECT NULL, NULL, date_part('epoch', clock_timestamp()), NULL
"""

# A worker of one queue does not walk the bands of thousands of others.
SWEEP_QUEUES_SQL = f"WITH RECURSIVE {_WITHIN_SQL}" + _FOUND_SQL.format(
    found=f"{_KNOWN_SQL} UNION ALL SELECT queue_name, priority, available_at, id FROM within"
)

SWEEP_SQL = f"WITH RECURSIVE {_WITHIN_SQL}, {_OUTSIDE_SQL}" + _FOUND_SQL.format(
    found=f"""{_KNOWN_SQL}
    UNION ALL SELECT queue_name, priority, available_at, id FROM within
    UNION ALL SELECT queue_name, priority, available_at, id FROM outside"""
)

# A volatile function is never an index condition; the clock in a subselect is. It is read once, so that an
# attempt has one beginning: the first start of a job is when it was claimed first, to the microsecond.
# date_part, not EXTRACT, which computes with decimals, and what is the same for all jobs only once.
# NO KEY UPDATE, so that the foreign keys of attempts do not wait for a claim. The ids go through an array,
# because the planner once turned a join here into a merge over the whole primary key.
CLAIM_SQL = """
WITH moment AS MATERIALIZED (
    SELECT now, now + make_interval(secs => %(lease_seconds)s::float8) AS lease_until, date_part('epoch', now) AS epoch
      FROM clock_timestamp() AS now
), picked AS MATERIALIZED (
    SELECT job.id
      FROM unnest(
               %(queue_names)s::text[], %(priorities)s::smallint[], %(floors_at)s::float8[], %(floor_ids)s::bigint[]
           ) AS band(queue_name, priority, floor_at, floor_id)
     CROSS JOIN LATERAL (
        SELECT id
          FROM django_pgqueue_job
         WHERE status = 'pending'
           AND queue_name = band.queue_name
           AND priority = band.priority
           AND available_at <= (SELECT now FROM moment)
           AND (available_at, id) >= (to_timestamp(band.floor_at), band.floor_id)
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
       lease_until = (SELECT lease_until FROM moment),
       started_at = COALESCE(started_at, (SELECT now FROM moment))
 WHERE id = ANY(ARRAY(SELECT id FROM picked))
RETURNING id, claim_version, backend, queue_name, task_path, args::text, kwargs::text, priority,
          attempts, max_attempts, snoozes, claimed_by, date_part('epoch', available_at),
          date_part('epoch', created_at),
          CASE WHEN started_at = (SELECT now FROM moment) THEN (SELECT epoch FROM moment)
               ELSE date_part('epoch', started_at) END,
          (SELECT epoch FROM moment)
"""

_PRIORITY = itemgetter(7)  # of the columns returned
_AGE = itemgetter(12, 0)

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
    return sweep_parts(connection, (), queue_names).bands


def sweep_parts(
    connection: Connection,
    known: Sequence[Part],
    queue_names: Sequence[str] | None = None,
    excluded: Iterable[str] = (),
) -> Sweep:
    """
    Look at parts of the *known* bands, and for bands that are not known; locks nothing.

    Of *queue_names*, if they are given, else of all queues but the *excluded*.
    """
    sql = SWEEP_SQL if queue_names is None else SWEEP_QUEUES_SQL
    rows = fetch(connection, sql, sweep_parameters(known, queue_names, excluded))
    [clock] = [moment for name, _, moment, _ in rows if name is None]
    found = [row for row in rows if row[0] is not None]
    return Sweep([Band(name, priority, at, job_id, at - clock) for name, priority, at, job_id in found], clock)


def sweep_parameters(
    known: Sequence[Part], queue_names: Iterable[str] | None = None, excluded: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the parameters of the sweep: what is known, and the gaps between."""
    priorities: dict[str, list[int]] = {name: [] for name in queue_names or ()}
    for part in known:
        priorities.setdefault(part.queue_name, []).append(part.priority)
    gaps = [gap for name, those_known in priorities.items() for gap in _gaps(name, those_known)]
    return {
        "queue_names": [part.queue_name for part in known],
        "priorities": [part.priority for part in known],
        "since": [part.since for part in known],
        "until": [part.until for part in known],
        "gap_queues": [name for name, _, _ in gaps],
        "gap_below": [below for _, below, _ in gaps],
        "gap_above": [above for _, _, above in gaps],
        "skipped": sorted({*priorities, *excluded}) if queue_names is None else [],
    }


def _gaps(queue_name: str, priorities: list[int]) -> Iterable[tuple[str, int, int]]:
    """Yield the gaps around *priorities* that are not empty: the queue, and the priorities that bound the gap."""
    bounds = [PRIORITY_BOUND, *sorted(set(priorities), reverse=True), -PRIORITY_BOUND]
    return ((queue_name, below, above) for below, above in pairwise(bounds) if below - above > 1)


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
        "floors_at": [band.floor_at for band in bands],
        "floor_ids": [band.floor_id for band in bands],
        "owner": owner,
        "limit": limit,
        "lease_seconds": lease_seconds,
    }
    rows = fetch(connection, CLAIM_SQL, parameters)
    rows.sort(key=_AGE)  # RETURNING promises no order
    rows.sort(key=_PRIORITY, reverse=True)
    return [ClaimedJob._make((Claim._make(row[:2]), *row[2:])) for row in rows]


def due(bands: Sequence[Band]) -> list[Band]:
    """Return those of *bands* whose first job may run now: highest priority first, then longest waiting."""
    return sorted(
        (band for band in bands if band.due_in <= 0),
        key=lambda band: (-band.priority, band.first_available_at, band.first_id),
    )


def earlier_attempts(connection: Connection, jobs: Sequence[ClaimedJob]) -> dict[int, list[EarlierAttempt]]:
    """Return, by id, the counted attempts that those of *jobs* had before, oldest first."""
    retried = [job.id for job in jobs if job.attempts > 1]
    found: dict[int, list[EarlierAttempt]] = {}
    for job_id, *attempt in fetch(connection, EARLIER_SQL, {"ids": retried}) if retried else ():
        found.setdefault(job_id, []).append(EarlierAttempt(*attempt))
    return found
