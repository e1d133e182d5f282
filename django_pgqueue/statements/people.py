"""
What people do to jobs: hold, unhold, cancel, requeue.

For many jobs at once the rows are locked in the order of their ids, and those that someone else holds are
passed over, so that a person's click neither waits for a worker nor makes one wait. For one exact job the
answer is "busy", at once (NOWAIT). Rows in another status are not touched, and simply not returned.

A running job can be cancelled, too. Its claim ends with that, so what its task comes to is no longer recorded,
and the workers are told, so that whichever runs it stops.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..exceptions import TaskCancelled
from ..outcomes import class_path_of
from ..states import Status
from .bell import ring_for
from .database import CANCEL_CHANNEL, Connection, fetch

CANCELLED_TEXT = "The job was cancelled while this attempt was running."

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
RETURNING id, false AS was_running
"""

# Nothing may appear below the place up to which workers have looked, hence GREATEST.
UNHOLD_SQL = f"""
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
    RETURNING id, queue_name, available_at
), rung AS ({ring_for("unheld")})
SELECT id, false AS was_running, (SELECT count(*) FROM rung) FROM unheld
"""

# What `locked` says of a row is how it stood under the lock: no claim and no ending can come in between. The
# version rises where there was a claim, which thereby ends. One notification, whatever the number of jobs.
CANCEL_SQL = """
WITH locked AS MATERIALIZED (
    SELECT id, status
      FROM django_pgqueue_job
     WHERE id = ANY(%(ids)s::bigint[])
       AND status IN ('pending', 'held', 'running')
     ORDER BY id
       FOR NO KEY UPDATE SKIP LOCKED
), cancelled AS (
    UPDATE django_pgqueue_job
       SET claim_version = CASE WHEN status = 'running' THEN claim_version + 1 ELSE claim_version END,
           last_error = CASE WHEN status = 'running' THEN %(message)s ELSE last_error END,
           status = 'cancelled',
           finished_at = clock_timestamp(),
           lease_until = NULL
     WHERE id = ANY(ARRAY(SELECT id FROM locked))
    RETURNING id, claim_version - 1 AS claim_version, attempts, claimed_by, claimed_at,
              id = ANY(ARRAY(SELECT id FROM locked WHERE status = 'running')) AS was_running
), recorded AS (
    INSERT INTO django_pgqueue_jobattempt (
        job_id, claim_version, attempt, outcome, counted,
        error_class, fingerprint, message, traceback, worker, started_at, ended_at
    )
    SELECT id, claim_version, attempts, 'cancelled', true,
           %(error_class)s, 'cancelled', %(message)s, '', claimed_by, claimed_at, clock_timestamp()
      FROM cancelled
     WHERE was_running
), told AS (
    SELECT pg_notify(%(cancel_channel)s, '') WHERE (SELECT bool_or(was_running) FROM cancelled)
)
SELECT id, was_running, (SELECT count(*) FROM told) FROM cancelled
"""

# A job whose key a live job holds stays, and so do all but the first of several with one key. The key may
# still be taken by a transaction that commits first: that is a unique violation, and the caller's to handle.
# A scalar subquery, because EXISTS may be planned as a join, or hashed, over every job that has a key.
REQUEUE_SQL = f"""
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
    RETURNING id, queue_name, available_at
), rung AS ({ring_for("requeued")})
SELECT id, false AS was_running, (SELECT count(*) FROM rung) FROM requeued
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


# What each of the four returns: the ids of the jobs that it changed, and whether a worker was running the job.
Done = dict[int, bool]


def hold(connection: Connection, ids: Sequence[int]) -> Done:
    """Set the pending jobs among *ids* aside."""
    return _changed(connection, HOLD_SQL, ids)


def unhold(connection: Connection, ids: Sequence[int]) -> Done:
    """Put the held jobs among *ids* back."""
    return _changed(connection, UNHOLD_SQL, ids)


def cancel(connection: Connection, ids: Sequence[int]) -> Done:
    """
    End the pending and held jobs among *ids* without running them, and the claims of the running ones.

    The attempt of a running one counts, and is recorded as cancelled.
    """
    return _changed(connection, CANCEL_SQL, ids)


def requeue(connection: Connection, ids: Sequence[int]) -> Done:
    """
    Give the failed and cancelled jobs among *ids* fresh attempts, available now.

    Raises a unique violation (23505) when another transaction takes a key of theirs meanwhile.
    """
    return _changed(connection, REQUEUE_SQL, ids)


class Verb(NamedTuple):
    """One of the functions above, and the statuses of the jobs that it changes."""

    change: Callable[[Connection, Sequence[int]], Done]
    takes: tuple[Status, ...]


HOLD = Verb(hold, (Status.PENDING,))
UNHOLD = Verb(unhold, (Status.HELD,))
CANCEL = Verb(cancel, (Status.PENDING, Status.HELD, Status.RUNNING))
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


def _changed(connection: Connection, sql: str, ids: Sequence[int]) -> Done:
    parameters = {
        "ids": list(ids),
        "cancel_channel": CANCEL_CHANNEL,
        "error_class": class_path_of(TaskCancelled),
        "message": CANCELLED_TEXT,
    }
    return {job_id: was_running for job_id, was_running, *_ in fetch(connection, sql, parameters)}
