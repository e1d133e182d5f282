"""
The record of what has really happened: one row for each time that a task came to its end.

It is written by a connection of its own, in autocommit, straight to the server. Where the server is away, the
task waits for it. Nothing is written twice: a row has a number that was chosen before the first try.
"""

import asyncio
import os
import time
import uuid
from typing import Any

import psycopg
from django.db import connection

CREATE_SQL = """
CREATE TABLE chaos_effect (
    run uuid PRIMARY KEY,
    token text NOT NULL,
    kind text NOT NULL,
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    claimed_at timestamptz NOT NULL, -- names the claim, together with the job
    happened_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON chaos_effect (token);
CREATE TABLE chaos_once (token text NOT NULL, job_id bigint NOT NULL); -- written by the jobs' own transactions
"""

RECORD_SQL = """
INSERT INTO chaos_effect (run, token, kind, job_id, attempt, claimed_at)
VALUES (%(run)s, %(token)s, %(kind)s, %(job_id)s, %(attempt)s, %(claimed_at)s)
    ON CONFLICT (run) DO NOTHING
"""

OPTIONS = {
    "autocommit": True,
    "connect_timeout": 5,
    "options": "-c statement_timeout=10s -c default_transaction_read_only=off",
}
PAUSE_SECONDS = 0.1  # between two tries to reach the server


def record(context: Any, kind: str, token: str) -> None:
    values = _values(context, kind, token)
    while True:
        try:
            with psycopg.connect(os.environ["CHAOS_OUTSIDE"], **OPTIONS) as connection:
                connection.execute(RECORD_SQL, values)
            return
        except psycopg.OperationalError:
            time.sleep(PAUSE_SECONDS)


async def arecord(context: Any, kind: str, token: str) -> None:
    values = _values(context, kind, token)
    while True:
        try:
            async with await psycopg.AsyncConnection.connect(os.environ["CHAOS_OUTSIDE"], **OPTIONS) as connection:
                await connection.execute(RECORD_SQL, values)
            return
        except psycopg.OperationalError:
            await asyncio.sleep(PAUSE_SECONDS)


def happen_with(context: Any, token: str) -> None:
    """An effect in the transaction of the job itself, which is recorded by nobody else."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO chaos_once (token, job_id) VALUES (%s, %s)", [token, int(context.task_result.id)])


def _values(context: Any, kind: str, token: str) -> dict[str, Any]:
    result = context.task_result
    return {
        "run": uuid.uuid4(),
        "token": token,
        "kind": kind,
        "job_id": int(result.id),
        "attempt": context.attempt,
        "claimed_at": result.last_attempted_at,
    }
