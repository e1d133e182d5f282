"""Insert jobs, in whatever transaction is open, and ring for idle workers at its commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from .database import CHANNEL, Connection, fetch

BULK_ROWS = 5_000  # rows of one statement, to bound its text


@dataclass(frozen=True, slots=True)
class NewJob:
    """A row to be. *args* and *kwargs* are JSON texts; *run_after* is ``None`` for now."""

    backend: str
    queue_name: str
    task_path: str
    args: str
    kwargs: str
    priority: int
    max_attempts: int
    run_after: datetime | None


class Inserted(NamedTuple):
    id: int
    created_at: datetime


# A moment in the past becomes now: nothing may appear below the place up to which workers have looked.
INSERT_SQL = """
INSERT INTO django_pgqueue_job (
    backend, queue_name, task_path, args, kwargs, status, priority,
    available_at, created_at, attempts, max_attempts, claim_version
)
VALUES (
    %(backend)s, %(queue_name)s, %(task_path)s, %(args)s::jsonb, %(kwargs)s::jsonb, 'pending', %(priority)s,
    GREATEST(%(run_after)s::timestamptz, clock_timestamp()), clock_timestamp(), 0, %(max_attempts)s, 0
)
RETURNING id, created_at, pg_notify(%(channel)s, queue_name)
"""

# Ids are given in the order of the SELECT, hence the ORDER BY; RETURNING promises no order.
INSERT_MANY_SQL = """
WITH inserted AS (
    INSERT INTO django_pgqueue_job (
        backend, queue_name, task_path, args, kwargs, status, priority,
        available_at, created_at, attempts, max_attempts, claim_version
    )
    SELECT %(backend)s, %(queue_name)s, %(task_path)s, call.args::jsonb, call.kwargs::jsonb, 'pending', %(priority)s,
           GREATEST(%(run_after)s::timestamptz, (SELECT clock_timestamp())), (SELECT clock_timestamp()),
           0, %(max_attempts)s, 0
      FROM unnest(%(args)s::text[], %(kwargs)s::text[]) WITH ORDINALITY AS call(args, kwargs, place)
     ORDER BY call.place
    RETURNING id
)
SELECT id, NULL FROM inserted
UNION ALL
SELECT NULL, pg_notify(%(channel)s, %(queue_name)s)::text
"""


def insert_job(connection: Connection, job: NewJob) -> Inserted:
    """Insert one pending job."""
    parameters = {
        "backend": job.backend,
        "queue_name": job.queue_name,
        "task_path": job.task_path,
        "args": job.args,
        "kwargs": job.kwargs,
        "priority": job.priority,
        "run_after": job.run_after,
        "max_attempts": job.max_attempts,
        "channel": CHANNEL,
    }
    [(job_id, created_at, _)] = fetch(connection, INSERT_SQL, parameters)
    return Inserted(job_id, created_at)


def insert_jobs(connection: Connection, template: NewJob, calls: Sequence[tuple[str, str]]) -> list[int]:
    """
    Insert one pending job like *template* for each pair of JSON texts in *calls*.

    Return the ids in the order of *calls*. Several statements when there are many: the caller holds a
    transaction.
    """
    ids: list[int] = []
    for start in range(0, len(calls), BULK_ROWS):
        part = calls[start : start + BULK_ROWS]
        parameters = {
            "backend": template.backend,
            "queue_name": template.queue_name,
            "task_path": template.task_path,
            "priority": template.priority,
            "run_after": template.run_after,
            "max_attempts": template.max_attempts,
            "channel": CHANNEL,
            "args": [args for args, _ in part],
            "kwargs": [kwargs for _, kwargs in part],
        }
        ids += sorted(job_id for job_id, _ in fetch(connection, INSERT_MANY_SQL, parameters) if job_id is not None)
    return ids
