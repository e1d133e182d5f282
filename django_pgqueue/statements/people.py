"""
What people do to jobs: hold, unhold, cancel, requeue.

For many jobs at once the rows are locked in the order of their ids, and those that someone else holds are
passed over, so that a person's click neither waits for a worker nor makes one wait. For one exact job the
answer is "busy", at once (NOWAIT). Rows in another status are not touched, and simply not returned.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..states import Status
from .database import CHANNEL, Connection, fetch

# An expression, which no planner can take for the condition of the pending index and walk that instead.
HOLD_SQL = """
WITH locked AS MATERIALIZED (
    SELECT id
      FROM django_pgqueue_job
     WHERE id = ANY(%(ids)s::bigint[])
       AND status || '' = 'pending'
     ORDER BY id
       FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE django_pgqueue_job
   SET status = 'held'
 WHERE id = ANY(ARRAY(SELECT id FROM locked))
RETURNING id
"""

# Nothing may appear below the place up to which workers have looked, hence GREATEST.
UNHOLD_SQL = """
WITH locked AS MATERIALIZED (
    SELECT id
      FROM django_pgqueue_job
     WHERE id = ANY(%(ids)s::bigint[])
       AND status = 'held'
     ORDER BY id
       FOR NO KEY UPDATE SKIP LOCKED
), unheld AS (
    UPDATE django_pgqueue_job
       SET status = 'pending',
           available_at = GREATEST(available_at, clock_timestamp())
     WHERE id = ANY(ARRAY(SELECT id FROM locked))
    RETURNING id, queue_name
), rung AS (
    SELECT pg_notify(%(channel)s, queue_name) FROM unheld GROUP BY queue_name
)
SELECT id, (SELECT count(*) FROM rung) FROM unheld
"""

CANCEL_SQL = """
WITH locked AS MATERIALIZED (
    SELECT id
      FROM django_pgqueue_job
     WHERE id = ANY(%(ids)s::bigint[])
       AND status IN ('pending', 'held')
     ORDER BY id
       FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE django_pgqueue_job
   SET status = 'cancelled',
       finished_at = clock_timestamp()
 WHERE id = ANY(ARRAY(SELECT id FROM locked))
RETURNING id
"""

# A job whose key a live job holds stays, and so do all but the first of several with one key. The key may
# still be taken by a transaction that commits first: that is a unique violation, and the caller's to handle.
# A scalar subquery, because EXISTS may be planned as a join, or hashed, over every job that has a key.
REQUEUE_SQL = """
WITH locked AS MATERIALIZED (
    SELECT id, task_path, job_key
      FROM django_pgqueue_job AS dead
     WHERE id = ANY(%(ids)s::bigint[])
       AND status IN ('failed', 'cancelled')
       AND (
               SELECT live.id
                 FROM django_pgqueue_job AS live
                WHERE live.task_path = dead.task_path
                  AND live.job_key = dead.job_key
                  AND live.status IN ('pending', 'blocked', 'held', 'running')
                LIMIT 1
           ) IS NULL
     ORDER BY id
       FOR NO KEY UPDATE OF dead SKIP LOCKED
), first AS (
    SELECT min(id) AS id
      FROM locked
     GROUP BY task_path, job_key, CASE WHEN job_key IS NULL THEN id END
), requeued AS (
    UPDATE django_pgqueue_job
       SET status = 'pending',
           attempts = 0,
           snoozes = 0,
           claim_version = claim_version + 1,
           available_at = clock_timestamp(),
           started_at = NULL,
           finished_at = NULL,
           return_value = NULL
     WHERE id = ANY(ARRAY(SELECT id FROM first))
    RETURNING id, queue_name
), rung AS (
    SELECT pg_notify(%(channel)s, queue_name) FROM requeued GROUP BY queue_name
)
SELECT id, (SELECT count(*) FROM rung) FROM requeued
"""

LOCK_ONE_SQL = """
SELECT status
  FROM django_pgqueue_job
 WHERE id = %(id)s
   FOR NO KEY UPDATE NOWAIT
"""

# Why rows were not returned: those still in a status that the verb takes were busy, unless their key was held.
LEFT_OUT_SQL = """
SELECT count(*) FILTER (WHERE NOT key_is_held),
       count(*) FILTER (WHERE key_is_held)
  FROM (
    SELECT (
               SELECT live.id
                 FROM django_pgqueue_job AS live
                WHERE live.task_path = job.task_path
                  AND live.job_key = job.job_key
                  AND live.status IN ('pending', 'blocked', 'held', 'running')
                  AND live.id <> job.id
                LIMIT 1
           ) IS NOT NULL AS key_is_held
      FROM django_pgqueue_job AS job
     WHERE id = ANY(%(ids)s::bigint[])
       AND status = ANY(%(statuses)s::text[])
  ) AS left_out
"""


def hold(connection: Connection, ids: Sequence[int]) -> set[int]:
    """Set the pending jobs among *ids* aside; return the ids of those that were."""
    return _changed(connection, HOLD_SQL, ids)


def unhold(connection: Connection, ids: Sequence[int]) -> set[int]:
    """Put the held jobs among *ids* back; return their ids."""
    return _changed(connection, UNHOLD_SQL, ids)


def cancel(connection: Connection, ids: Sequence[int]) -> set[int]:
    """End the pending and held jobs among *ids* without running them; return their ids."""
    return _changed(connection, CANCEL_SQL, ids)


def requeue(connection: Connection, ids: Sequence[int]) -> set[int]:
    """
    Give the failed and cancelled jobs among *ids* fresh attempts, available now; return their ids.

    Raises a unique violation (23505) when another transaction takes a key of theirs meanwhile.
    """
    return _changed(connection, REQUEUE_SQL, ids)


class Verb(NamedTuple):
    """One of the functions above, and the statuses of the jobs that it changes."""

    change: Callable[[Connection, Sequence[int]], set[int]]
    takes: tuple[Status, ...]


HOLD = Verb(hold, (Status.PENDING,))
UNHOLD = Verb(unhold, (Status.HELD,))
CANCEL = Verb(cancel, (Status.PENDING, Status.HELD))
REQUEUE = Verb(requeue, (Status.FAILED, Status.CANCELLED))


def lock_one(connection: Connection, job_id: int) -> str | None:
    """Lock one job without waiting and return its status, ``None`` if it is gone; SQLSTATE 55P03 if it is held."""
    rows = fetch(connection, LOCK_ONE_SQL, {"id": job_id})
    return rows[0][0] if rows else None


def left_out(connection: Connection, ids: Sequence[int], statuses: Sequence[Status]) -> tuple[int, int]:
    """Of the jobs among *ids* that still have one of *statuses*, count the busy ones and those whose key is held."""
    parameters = {"ids": list(ids), "statuses": [status.value for status in statuses]}
    busy, key_held = fetch(connection, LEFT_OUT_SQL, parameters)[0]
    return busy, key_held


def _changed(connection: Connection, sql: str, ids: Sequence[int]) -> set[int]:
    return {row[0] for row in fetch(connection, sql, {"ids": list(ids), "channel": CHANNEL})}
