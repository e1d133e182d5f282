"""
Insert jobs, in whatever transaction is open, and ring for idle workers at its commit.

A job with a key is inserted only if no live job of its task has that key. Whoever inserted one and has
not committed yet is waited for: if that rolls back, the key is free. Several keys are taken in their own
order, so that two callers with the same keys do not wait for each other in a circle.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from .database import CHANNEL, Connection, fetch

T = TypeVar("T")

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
    job_key: str | None = None


class Inserted(NamedTuple):
    """The job that asks for the task to be run; not *is_new* when a live one held the key."""

    id: int
    created_at: datetime
    is_new: bool = True


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

# DO NOTHING, so that the caller's transaction goes on. The condition is that of the unique index.
INSERT_WITH_KEY_SQL = """
INSERT INTO django_pgqueue_job (
    backend, queue_name, task_path, args, kwargs, status, priority, job_key,
    available_at, created_at, attempts, max_attempts, claim_version
)
VALUES (
    %(backend)s, %(queue_name)s, %(task_path)s, %(args)s::jsonb, %(kwargs)s::jsonb, 'pending', %(priority)s,
    %(job_key)s,
    GREATEST(%(run_after)s::timestamptz, clock_timestamp()), clock_timestamp(), 0, %(max_attempts)s, 0
)
    ON CONFLICT (task_path, job_key)
          WHERE job_key IS NOT NULL AND status IN ('pending', 'blocked', 'held', 'running')
       DO NOTHING
RETURNING id, created_at, pg_notify(%(channel)s, queue_name)
"""

INSERT_MANY_WITH_KEYS_SQL = """
WITH inserted AS (
    INSERT INTO django_pgqueue_job (
        backend, queue_name, task_path, args, kwargs, status, priority, job_key,
        available_at, created_at, attempts, max_attempts, claim_version
    )
    SELECT %(backend)s, %(queue_name)s, %(task_path)s, call.args::jsonb, call.kwargs::jsonb,
           'pending', %(priority)s, call.job_key,
           GREATEST(%(run_after)s::timestamptz, (SELECT clock_timestamp())), (SELECT clock_timestamp()),
           0, %(max_attempts)s, 0
      FROM unnest(%(args)s::text[], %(kwargs)s::text[], %(job_keys)s::text[]) AS call(args, kwargs, job_key)
     ORDER BY call.job_key COLLATE "C"
        ON CONFLICT (task_path, job_key)
              WHERE job_key IS NOT NULL AND status IN ('pending', 'blocked', 'held', 'running')
           DO NOTHING
    RETURNING id, job_key
)
SELECT id, job_key FROM inserted
UNION ALL
SELECT NULL, pg_notify(%(channel)s, %(queue_name)s)::text
"""

HOLDERS_SQL = """
SELECT id, job_key, created_at
  FROM django_pgqueue_job
 WHERE task_path = %(task_path)s
   AND job_key = ANY(%(job_keys)s::text[])
   AND status IN ('pending', 'blocked', 'held', 'running')
"""


def insert_job(connection: Connection, job: NewJob) -> Inserted:
    """Insert one pending job; with a key that a live job of the task holds, return that one instead."""
    parameters = {**_columns(job), "args": job.args, "kwargs": job.kwargs}
    if job.job_key is None:
        [(job_id, created_at, _)] = fetch(connection, INSERT_SQL, parameters)
        return Inserted(job_id, created_at)
    parameters["job_key"] = job.job_key
    while True:
        for job_id, created_at, _ in fetch(connection, INSERT_WITH_KEY_SQL, parameters):
            return Inserted(job_id, created_at)
        # A statement of its own, to see a holder that was committed while the insert waited for it.
        holders = fetch(connection, HOLDERS_SQL, {"task_path": job.task_path, "job_keys": [job.job_key]})
        for job_id, _, created_at in holders:
            return Inserted(job_id, created_at, is_new=False)
        # The holder has ended in between: the key is free.


def insert_jobs(connection: Connection, template: NewJob, calls: Sequence[tuple[str, str]]) -> list[int]:
    """
    Insert one pending job like *template* for each pair of JSON texts in *calls*.

    Return the ids in the order of *calls*. Several statements when there are many: the caller holds a
    transaction.
    """
    ids: list[int] = []
    for part in _parts(calls):
        parameters = {
            **_columns(template),
            "args": [args for args, _ in part],
            "kwargs": [kwargs for _, kwargs in part],
        }
        ids += sorted(job_id for job_id, _ in fetch(connection, INSERT_MANY_SQL, parameters) if job_id is not None)
    return ids


def insert_jobs_with_keys(
    connection: Connection, template: NewJob, calls: Mapping[str, tuple[str, str]]
) -> dict[str, int]:
    """
    Insert one pending job like *template* for each key of *calls* that no live job of the task holds.

    Return, for every key, the id of the job that holds it now. The caller holds a transaction.
    """
    ids: dict[str, int] = {}
    while missing := sorted(calls.keys() - ids.keys()):
        for keys in _parts(missing):
            parameters = {
                **_columns(template),
                "job_keys": list(keys),
                "args": [calls[key][0] for key in keys],
                "kwargs": [calls[key][1] for key in keys],
            }
            inserted = fetch(connection, INSERT_MANY_WITH_KEYS_SQL, parameters)
            ids |= {key: job_id for job_id, key in inserted if job_id is not None}
            held = [key for key in keys if key not in ids]
            if held:
                holders = fetch(connection, HOLDERS_SQL, {"task_path": template.task_path, "job_keys": held})
                ids |= {key: job_id for job_id, key, _ in holders}
    return ids


def _columns(job: NewJob) -> dict[str, Any]:
    return {
        "backend": job.backend,
        "queue_name": job.queue_name,
        "task_path": job.task_path,
        "priority": job.priority,
        "run_after": job.run_after,
        "max_attempts": job.max_attempts,
        "channel": CHANNEL,
    }


def _parts(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    return (rows[start : start + BULK_ROWS] for start in range(0, len(rows), BULK_ROWS))
