"""Prune done jobs, and keep the rows that show which workers are there."""

from collections.abc import Sequence
from typing import NamedTuple

from .database import Connection, fetch

# Done jobs stand in the primary key only, so pruning walks it: old jobs have low ids. What the walk has seen
# is asked again under each row's lock.
PRUNE_SQL = """
WITH walked AS MATERIALIZED (
    SELECT id, status, created_at
      FROM django_pgqueue_job
     WHERE id > %(after)s
     ORDER BY id
     LIMIT %(limit)s
), old AS MATERIALIZED (
    SELECT id
      FROM django_pgqueue_job
     WHERE id = ANY(ARRAY(SELECT id FROM walked WHERE status = 'done'))
       AND status = 'done'
       AND finished_at < clock_timestamp() - make_interval(secs => %(older_than)s::float8)
     ORDER BY id
       FOR UPDATE SKIP LOCKED
), forgotten AS (
    DELETE FROM django_pgqueue_jobattempt WHERE job_id = ANY(ARRAY(SELECT id FROM old))
), deleted AS (
    DELETE FROM django_pgqueue_job WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING id
)
SELECT (SELECT count(*) FROM deleted),
       (SELECT max(id) FROM walked),
       (SELECT count(*) FROM walked) < %(limit)s
           OR (SELECT min(created_at) FROM walked) >= clock_timestamp() - make_interval(secs => %(older_than)s::float8)
"""

DELETE_DONE_SQL = """
WITH old AS MATERIALIZED (
    SELECT id
      FROM django_pgqueue_job
     WHERE id = ANY(%(ids)s::bigint[])
       AND status = 'done'
     ORDER BY id
       FOR UPDATE SKIP LOCKED
), forgotten AS (
    DELETE FROM django_pgqueue_jobattempt WHERE job_id = ANY(ARRAY(SELECT id FROM old))
)
DELETE FROM django_pgqueue_job WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING id
"""

REPORT_WORKER_SQL = """
INSERT INTO django_pgqueue_worker (
    name, hostname, process_id, backend, queues, serves, concurrency, started_at, seen_at, turned_at
)
VALUES (
    %(name)s, %(hostname)s, %(process_id)s, %(backend)s, %(queues)s, %(serves)s::jsonb, %(concurrency)s,
    clock_timestamp(), clock_timestamp(), clock_timestamp() - make_interval(secs => %(turned_for)s::float8)
)
    ON CONFLICT (name) DO UPDATE SET seen_at = EXCLUDED.seen_at, turned_at = EXCLUDED.turned_at
RETURNING id
"""

FORGET_WORKERS_SQL = """
DELETE FROM django_pgqueue_worker
 WHERE name = %(name)s
    OR seen_at < clock_timestamp() - make_interval(secs => %(unseen_for)s::float8)
RETURNING id
"""


class Pruned(NamedTuple):
    deleted: int
    last_id: int | None  # walk on from here
    finished: bool  # nothing behind it can be old enough


def prune(connection: Connection, after: int, older_than: float, limit: int) -> Pruned:
    """Delete, among the *limit* jobs that follow id *after*, the done ones that finished *older_than* seconds ago."""
    return Pruned(*fetch(connection, PRUNE_SQL, {"after": after, "older_than": older_than, "limit": limit})[0])


def delete_done(connection: Connection, ids: Sequence[int]) -> int:
    """Delete the done jobs among *ids* that nobody holds, with their attempts; return how many."""
    return len(fetch(connection, DELETE_DONE_SQL, {"ids": list(ids)}))


class WorkerReport(NamedTuple):
    """
    What a worker says of itself. *queues* are for people; *serves* is JSON, for code.

    *turned_for* is how many seconds ago the slowest of its control loops last turned.
    """

    name: str
    hostname: str
    process_id: int
    backend: str
    queues: str
    serves: str
    concurrency: int
    turned_for: float


def report_worker(connection: Connection, report: WorkerReport) -> None:
    """Write that a worker is there."""
    fetch(connection, REPORT_WORKER_SQL, report._asdict())


def forget_workers(connection: Connection, name: str, unseen_for: float) -> None:
    """Remove worker *name*, and those that have not reported for *unseen_for* seconds."""
    fetch(connection, FORGET_WORKERS_SQL, {"name": name, "unseen_for": unseen_for})
