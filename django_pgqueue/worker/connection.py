"""
A worker's own connections to the jobs' database, and what it does while there is none.

They are psycopg's, opened with the parameters of Django's DATABASES, not Django's own: a pool or a task
must never hand its session on, and no query log may grow for ever.
"""

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from django.db import connections
from psycopg import sql

from ..statements.database import BEGIN_ROUND_SQL, execute, fetch, is_schema_missing

logger = logging.getLogger("django_pgqueue")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0

LIMIT_SQL = "SELECT set_config('statement_timeout', %(milliseconds)s, true)"

# A network that swallows packets must be noticed well before a lease ends.
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class Session:
    """One connection, opened when it is asked for and forgotten after an error. For one thread."""

    def __init__(self, alias: str, application_name: str) -> None:
        self._alias = alias
        self._application_name = application_name
        self._connection: psycopg.Connection | None = None

    @property
    def connection(self) -> psycopg.Connection:
        """The open connection, in autocommit; raises ``psycopg.OperationalError`` when there can be none."""
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    @contextmanager
    def round(self, limit_seconds: float | None = None) -> Iterator[psycopg.Connection]:
        """
        One short transaction with a worker's settings; rolled back on any error, which goes on.

        *limit_seconds* is how long a statement may take, if that is less than a round usually allows.
        """
        connection = self.connection
        try:
            execute(connection, BEGIN_ROUND_SQL)
            if limit_seconds is not None:
                fetch(connection, LIMIT_SQL, {"milliseconds": f"{limit_seconds * 1000:.0f}"})
            yield connection
            execute(connection, "COMMIT")
        except BaseException:
            with suppress(psycopg.Error):
                execute(connection, "ROLLBACK")
            raise

    def close(self) -> None:
        """Close the connection if there is one; the next use opens another."""
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _connect(self) -> psycopg.Connection:
        wrapper = connections[self._alias]
        parameters = wrapper.get_connection_params()
        for django_only in ("context", "cursor_factory"):
            parameters.pop(django_only, None)
        parameters = {**_DEFAULTS, **parameters, "application_name": self._application_name}
        parameters["prepare_threshold"] = None  # a round begins with several statements in one, which none can prepare
        connection = psycopg.connect(**parameters, autocommit=True)
        if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):
            try:
                connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
            except psycopg.Error:
                connection.close()
                raise
        return connection


class Outage:
    """
    Time in which the database does not do what is asked: how long to pause, and one line at begin and end.

    All threads meet the same lost connection, so most of them report it at a low *level*. Any other error
    may be met by one of them alone, and is always a warning.
    """

    def __init__(self, level: int) -> None:
        self._lowest_level = level
        self._level = level
        self._since: float | None = None
        self._pause = FIRST_PAUSE_SECONDS

    def failed(self, error: BaseException) -> float:
        """Note that a try has failed with *error*; return the seconds to pause, with jitter."""
        if self._since is None:
            self._since = time.monotonic()
            is_away = isinstance(error, psycopg.OperationalError)
            self._level = self._lowest_level if is_away else max(self._lowest_level, logging.WARNING)
            ours = None if isinstance(error, psycopg.Error) else error
            logger.log(self._level, "%s Trying until it works.", describe(error), exc_info=ours)
        pause = self._pause * random.uniform(0.8, 1.2)
        self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)
        return pause

    def over(self) -> None:
        """Note that it has worked."""
        if self._since is not None:
            logger.log(self._level, "The database answers again, after %.1f s.", time.monotonic() - self._since)
            self._since = None
            self._pause = FIRST_PAUSE_SECONDS


def describe(error: BaseException) -> str:
    """One line that says what *error* means for a worker."""
    text = " ".join(str(error).split())
    if is_schema_missing(error):
        return f"The jobs' tables are not ready ({text}). Run 'manage.py migrate'."
    if isinstance(error, psycopg.OperationalError):
        return f"The database is not available ({text})."
    return f"The database is there, and something fails ({type(error).__name__}: {text})."
