"""What the statements share: the connection they ask for, a round's settings, and kinds of database errors."""

from collections.abc import Mapping
from typing import Any, Protocol

import django.db
import psycopg

CHANNEL = "django_pgqueue"  # notifications carry a queue's name and nothing else
CANCEL_CHANNEL = "django_pgqueue_cancel"  # and these nothing at all: some running job was cancelled

# One transaction of a worker. Read Committed whatever the project's default, because at stricter levels a
# row changed since the snapshot is an error (40001) instead of a row to pass over. Each statement is
# shaped for one index, and a planner that trusts stale statistics must not think otherwise. LOCAL,
# because a pooler would hand session settings on to someone else.
BEGIN_SQL = "BEGIN ISOLATION LEVEL READ COMMITTED"
BEGIN_ROUND_SQL = f"""
{BEGIN_SQL};
SET LOCAL lock_timeout = '500ms';
SET LOCAL statement_timeout = '10s';
SET LOCAL idle_in_transaction_session_timeout = '10s';
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = off;
SET LOCAL jit = off
"""

# The same for a session that is known to be ours alone: once, and a single statement needs no transaction around it.
SESSION_SQL = """
SET default_transaction_isolation = 'read committed';
SET lock_timeout = '500ms';
SET statement_timeout = '10s';
SET idle_in_transaction_session_timeout = '10s';
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SET jit = off
"""

ROUND_LIMIT_SECONDS = 10.0  # the statement_timeout above: two of them, and a pause, fit into the default lease

# The planner's part of it, for a transaction that someone else has begun.
PLANNER_SETTINGS_SQL = """
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = off;
SET LOCAL jit = off
"""

_LOCK_CONFLICTS = frozenset({"55P03", "40P01", "57014"})  # lock not available, deadlock, statement cancelled
_SCHEMA_MISSING = frozenset({"42P01", "42703", "3F000"})  # no such table, column, schema: not migrated yet
# Classes that say nothing of the values: connection, transaction, authorization, rollback, SQL and access,
# resources, object state, operator, system, configuration, internal. Other classes refuse a value, and
# there is no list of them: triggers raise what they like.
_NOT_OF_VALUES = frozenset(
    {"08", "0A", "25", "26", "28", "2D", "3D", "3F", "40", "42", "53", "55", "57", "58", "F0", "XX"}
)

ERRORS = (django.db.Error, psycopg.Error)


class Connection(Protocol):
    """Django's database wrapper or a connection of psycopg 3."""

    def cursor(self) -> Any: ...


def fetch(connection: Connection, sql: str, parameters: Mapping[str, Any]) -> list[tuple]:
    """Run *sql* and return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall()


def change(connection: Connection, sql: str, parameters: Mapping[str, Any]) -> int:
    """Run *sql*, which returns no rows, and return how many it has changed."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.rowcount


def execute(connection: Connection, sql: str) -> None:
    """Run *sql*, one statement or several, without parameters."""
    with connection.cursor() as cursor:
        cursor.execute(sql)


def is_lock_conflict(error: BaseException) -> bool:
    """Whether someone else's lock stood in the way, or a limit on waiting for it."""
    return sqlstate_of(error) in _LOCK_CONFLICTS


def is_schema_missing(error: BaseException) -> bool:
    """Whether the tables are not there, or not as this code knows them: ``migrate`` has not run."""
    return sqlstate_of(error) in _SCHEMA_MISSING


def is_refusal(error: BaseException) -> bool:
    """Whether the database refused a value, so that the same write would be refused again."""
    sqlstate = sqlstate_of(error)
    if sqlstate is not None:
        return sqlstate[:2] not in _NOT_OF_VALUES
    # The driver refuses some values itself, before the server sees them.
    return isinstance(error, psycopg.DataError | django.db.DataError | UnicodeEncodeError)


def sqlstate_of(error: BaseException) -> str | None:
    """Return the code that the database gave *error*, ``None`` if it is none of the database's."""
    driver_error = error if isinstance(error, psycopg.Error) else error.__cause__
    return driver_error.sqlstate if isinstance(driver_error, psycopg.Error) else None
