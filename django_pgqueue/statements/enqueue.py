"""
Insert jobs, in whatever transaction is open, and ring at its commit if workers sleep.

A job with a key is inserted only if no live job of its task has that key. Whoever inserted one and has
not committed yet is waited for: if that rolls back, the key is free. Several keys are taken in their own
order, so that two callers with the same keys do not wait for each other in a circle.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from ..conf import Notify
from .bell import RING
from .database import Connection, fetch
from .prepared import Prepared

BULK_ROWS = 5_000  # rows of one statement, to bound its text,
BULK_CHARS = 8_000_000  # and what they carry, a document of which has a limit


class NewJob(NamedTuple):
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
INSERT_SQL = f"""
INSERT INTO django_pgqueue_job (
    backend, queue_name, task_path, args, kwargs, status, priority,
    available_at, created_at, attempts, max_attempts, claim_version
)
VALUES (
    %(backend)s, %(queue_name)s, %(task_path)s, %(args)s::jsonb, %(kwargs)s::jsonb, 'pending', %(priority)s,
    GREATEST(%(run_after)s::timestamptz, clock_timestamp()), clock_timestamp(), 0, %(max_attempts)s, 0
)
RETURNING id, created_at, {RING}
"""

INSERT = Prepared(
    "django_pgqueue_insert",
    INSERT_SQL,
    fixed=("backend", "queue_name", "task_path", "priority", "max_attempts", "notify"),
    free={"args": "jsonb", "kwargs": "jsonb", "run_after": "timestamptz"},
)

# Ids are given in the order of the SELECT, hence the ORDER BY; RETURNING promises no order. Two documents, because
# one long text is read much faster than many short ones in an array.
INSERT_MANY_SQL = f"""
WITH inserted AS (
    INSERT INTO django_pgqueue_job (
        backend, queue_name, task_path, args, kwargs, status, priority,
        available_at, created_at, attempts, max_attempts, claim_version
    )
    SELECT %(backend)s, %(queue_name)s, %(task_path)s, call.args, call.kwargs, 'pending', %(priority)s,
           GREATEST(%(run_after)s::timestamptz, (SELECT clock_timestamp())), (SELECT clock_timestamp()),
           0, %(max_attempts)s, 0
      FROM ROWS FROM (
               jsonb_array_elements(%(args)s::jsonb), jsonb_array_elements(%(kwargs)s::jsonb)
           ) WITH ORDINALITY AS call(args, kwargs, place)
     ORDER BY call.place
    RETURNING id, queue_name, available_at
), rung AS (
    SELECT {RING} FROM (SELECT queue_name, available_at FROM inserted LIMIT 1) AS any_of_them
)
SELECT array_agg(id ORDER BY id), (SELECT count(*) FROM rung) FROM inserted
"""

# DO NOTHING, so that the caller's transaction goes on. The condition is that of the unique index.
INSERT_WITH_KEY_SQL = f"""
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
RETURNING id, created_at, {RING}
"""

INSERT_MANY_WITH_KEYS_SQL = f"""
WITH inserted AS (
    INSERT INTO django_pgqueue_job (
        backend, queue_name, task_path, args, kwargs, status, priority, job_key,
        available_at, created_at, attempts, max_attempts, claim_version
    )
    SELECT %(backend)s, %(queue_name)s, %(task_path)s, call.args, call.kwargs, 'pending', %(priority)s, call.job_key,
           GREATEST(%(run_after)s::timestamptz, (SELECT clock_timestamp())), (SELECT clock_timestamp()),
           0, %(max_attempts)s, 0
      FROM ROWS FROM (
               jsonb_array_elements(%(args)s::jsonb), jsonb_array_elements(%(kwargs)s::jsonb),
               unnest(%(job_keys)s::text[])
           ) AS call(args, kwargs, job_key)
     ORDER BY call.job_key COLLATE "C"
        ON CONFLICT (task_path, job_key)
              WHERE job_key IS NOT NULL AND status IN ('pending', 'blocked', 'held', 'running')
           DO NOTHING
    RETURNING id, job_key, queue_name, available_at
), rung AS (
    SELECT {RING} FROM (SELECT queue_name, available_at FROM inserted LIMIT 1) AS any_of_them
)
SELECT id, job_key, (SELECT count(*) FROM rung) FROM inserted
"""

HOLDERS_SQL = """
SELECT id, job_key, created_at
  FROM django_pgqueue_job
 WHERE task_path = %(task_path)s
   AND job_key = ANY(%(job_keys)s::text[])
   AND status IN ('pending', 'blocked', 'held', 'running')
"""


def insert_job(connection: Connection, job: NewJob, notify: Notify = "asleep") -> Inserted:
    """Insert one pending job; with a key that a live job of the task holds, return that one instead."""
    parameters = _parameters(job, notify, job.args, job.kwargs)
    if job.job_key is None:
        [(job_id, created_at, _)] = INSERT.fetch(connection, parameters)
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


def insert_jobs(
    connection: Connection, template: NewJob, calls: Sequence[tuple[str, str]], notify: Notify = "asleep"
) -> list[int]:
    """
    Insert one pending job like *template* for each pair of JSON texts in *calls*.

    Return the ids in the order of *calls*. Several statements when there are many: the caller holds a
    transaction.
    """
    ids: list[int] = []
    for part in _parts(calls):
        parameters = _parameters(template, notify, *_documents(part))
        [(inserted, _)] = fetch(connection, INSERT_MANY_SQL, parameters)
        ids += inserted
    return ids


def insert_jobs_with_keys(
    connection: Connection, template: NewJob, calls: Mapping[str, tuple[str, str]], notify: Notify = "asleep"
) -> dict[str, int]:
    """
    Insert one pending job like *template* for each key of *calls* that no live job of the task holds.

    Return, for every key, the id of the job that holds it now. The caller holds a transaction.
    """
    ids: dict[str, int] = {}
    while missing := sorted(calls.keys() - ids.keys()):
        rest = iter(missing)
        for part in _parts([calls[key] for key in missing]):
            keys = list(islice(rest, len(part)))
            parameters = {**_parameters(template, notify, *_documents(part)), "job_keys": keys}
            ids |= {key: job_id for job_id, key, _ in fetch(connection, INSERT_MANY_WITH_KEYS_SQL, parameters)}
            held = [key for key in keys if key not in ids]
            if held:
                holders = fetch(connection, HOLDERS_SQL, {"task_path": template.task_path, "job_keys": held})
                ids |= {key: job_id for job_id, key, _ in holders}
    return ids


def _parameters(job: NewJob, notify: Notify, args: str, kwargs: str) -> dict[str, Any]:
    return {
        "backend": job.backend,
        "queue_name": job.queue_name,
        "task_path": job.task_path,
        "args": args,
        "kwargs": kwargs,
        "priority": job.priority,
        "run_after": job.run_after,
        "max_attempts": job.max_attempts,
        "notify": notify,
    }


def _documents(calls: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the arguments of all *calls* as one JSON array, and their keyword arguments as another."""
    return f"[{','.join([args for args, _ in calls])}]", f"[{','.join([kwargs for _, kwargs in calls])}]"


def _parts(calls: Sequence[tuple[str, str]]) -> Iterator[Sequence[tuple[str, str]]]:
    """Cut *calls* into parts of up to BULK_ROWS, and of no more than BULK_CHARS unless one alone is larger."""
    start = chars = 0
    for place, (args, kwargs) in enumerate(calls):
        size = len(args) + len(kwargs)
        if place > start and (place - start == BULK_ROWS or chars + size > BULK_CHARS):
            yield calls[start:place]
            start, chars = place, 0
        chars += size
    if calls:
        yield calls[start:]
