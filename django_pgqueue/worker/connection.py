"""
A worker's own connections to the jobs' database, and what it does while there is none.

They are psycopg's, opened with the parameters of Django's DATABASES, not Django's own: a pool or a task
must never hand its session on, and no query log may grow for ever.

Nothing waits for ever here. The server ends a statement that takes too long. Where the server's answer does
not arrive either, because a network swallows it, the process's `Watchdog` breaks the connection off, and the
thread that waits meets an outage like any other.
"""

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from django.db import connections
from psycopg import sql
from psycopg.abc import PQGen
from psycopg.waiting import Wait

from ..statements import claim
from ..statements.database import (
    BEGIN_ROUND_SQL,
    BEGIN_SQL,
    ROUND_LIMIT_SECONDS,
    SESSION_SQL,
    execute,
    fetch,
    is_schema_missing,
)

logger = logging.getLogger("django_pgqueue")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
LONGEST_CONNECT_SECONDS = 20  # to all hosts together; the lease of what is held goes on
SHORTEST_CONNECT_SECONDS = 2  # of one host, as in libpq
ADDRESSES_OF_A_HOST = 2  # that a name stands for: each is tried for as long as the host
ANSWER_FACTOR = 1.5  # how much longer than the server's limit to wait for its answer
SHORTEST_IDLE_LIMIT_SECONDS = 1.0
# Planning these takes longer than finding one job with them. The others must know their values: an array of fences is
# a hash table if it is there when the statement is planned, and a list to be searched for each row if it is not.
PREPARED = frozenset({claim.CLAIM_SQL, claim.SWEEP_SQL, claim.SWEEP_QUEUES_SQL})

# What a server says, or nobody, while it cannot be used. Read-only is a standby, or a primary about to become one.
AWAY = (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction)

# Half a transaction whose client is gone must let go of its rows, too.
LIMIT_SQL = """
SELECT set_config('statement_timeout', %(milliseconds)s, %(for_the_round)s),
       set_config('idle_in_transaction_session_timeout', %(idle_milliseconds)s, %(for_the_round)s)
"""

# A network that swallows packets must be noticed well before a lease ends.
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class WatchedConnection(psycopg.Connection):
    """A connection that knows since when the server owes it an answer, and can be broken off from outside."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cursor_factory = _WatchedCursor
        self.answer_within = ROUND_LIMIT_SECONDS * ANSWER_FACTOR
        self.is_direct = False  # whether this session of the server is ours alone, and has a round's settings
        self._asked_at: float | None = None
        self._overdue: float | None = None
        self._was_broken_off = False
        self._asking = threading.Lock()
        self._meanwhile: Callable[[], None] | None = None

    @contextmanager
    def meanwhile(self, do: Callable[[], None]) -> Iterator[None]:
        """Call *do* when the first statement of the block has been sent and its answer is not there yet."""
        self._meanwhile = do
        try:
            yield
        finally:
            self._meanwhile = None

    def wait(self, gen: PQGen[Any], *args: Any, **options: Any) -> Any:
        if self._meanwhile is not None:
            do, self._meanwhile = self._meanwhile, None
            gen = _and_meanwhile(gen, lambda: self._call(do))
        return super().wait(gen, *args, **options)

    def _call(self, do: Callable[[], None]) -> None:
        """Call *do* in the middle of a wait: it is no part of that, however long it takes."""
        with self._asking:
            self._asked_at = None
        do()
        self._asked_at = time.monotonic()

    @property
    def is_waiting(self) -> bool:
        return self._asked_at is not None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let whatever happens in the block be broken off when it takes longer than `answer_within`."""
        self._asked_at = time.monotonic()
        try:
            yield
        except psycopg.OperationalError as error:
            if self._was_broken_off:
                raise psycopg.OperationalError(f"no answer within {self.answer_within:g} s") from error
            raise
        finally:
            with self._asking:
                self._asked_at = None

    def break_off(self, now: float) -> None:
        """
        Let a statement that is overdue at the moment *now* fail. For another thread.

        Only if it was overdue the last time, too: when this whole process has stood still, the answer may
        be there, and whoever waits for it must have a chance to take it.
        """
        with self._asking:  # so that the socket is still ours
            asked_at = self._asked_at
            if asked_at is None or now - asked_at < self.answer_within:
                return
            if self._overdue != asked_at:
                self._overdue = asked_at
                return
            self._was_broken_off = True
            # A copy of the descriptor: libpq reads the end of the stream, and closes its own.
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)


def _and_meanwhile(gen: PQGen[Any], do: Callable[[], None]) -> PQGen[Any]:
    """Do what *gen* does, and *do* when it has sent all and waits for what comes back."""
    try:
        wanted = next(gen)
        while wanted != Wait.R:
            wanted = gen.send((yield wanted))
    except StopIteration as end:
        return end.value
    do()
    while True:
        ready = yield wanted
        try:
            wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


class _WatchedCursor(psycopg.Cursor):
    def execute(self, query: Any, params: Any = None, **options: Any) -> "_WatchedCursor":
        connection = self.connection
        assert isinstance(connection, WatchedConnection)
        options["prepare"] = connection.is_direct and query in PREPARED
        # To read numbers as text takes longer than all else of a row. What has no parameters may be several statements.
        options["binary"] = params is not None
        with connection.waiting():
            super().execute(query, params, **options)
        return self


class Session:
    """
    One connection, opened when it is asked for and forgotten after an error. For one thread, but for `break_off`.

    *limit_seconds* is how long the server may take for a statement of a round, or to connect, if less than is usual.
    """

    def __init__(self, alias: str, application_name: str, limit_seconds: float = ROUND_LIMIT_SECONDS) -> None:
        self.limit_seconds = min(limit_seconds, ROUND_LIMIT_SECONDS)
        self._alias = alias
        self._application_name = application_name
        self._connection: WatchedConnection | None = None
        self._is_connecting = False

    @property
    def connection(self) -> WatchedConnection:
        """The open connection, in autocommit; raises ``psycopg.OperationalError`` when there can be none."""
        if self._connection is None or self._connection.closed:
            self._is_connecting = True
            try:
                self._connection = self._connect()
            finally:
                self._is_connecting = False
        return self._connection

    @property
    def is_waiting(self) -> bool:
        """Whether its thread waits for the database now, for a limited time. From any thread."""
        connection = self._connection
        return self._is_connecting or (connection is not None and connection.is_waiting)

    def break_off(self, now: float) -> None:
        """Let a statement fail whose answer is overdue at the monotonic moment *now*. From any thread."""
        connection = self._connection
        if connection is not None:
            connection.break_off(now)

    @contextmanager
    def round(self, limit_seconds: float | None = None) -> Iterator[WatchedConnection]:
        """
        One short transaction with a worker's settings; rolled back on any error, which goes on.

        *limit_seconds* is how long a statement may take, if that is less than the session allows.
        """
        connection = self.connection
        limit = self.limit_seconds if limit_seconds is None else min(limit_seconds, self.limit_seconds)
        connection.answer_within = limit * ANSWER_FACTOR
        try:
            execute(connection, BEGIN_SQL if connection.is_direct else BEGIN_ROUND_SQL)
            if limit != (self.limit_seconds if connection.is_direct else ROUND_LIMIT_SECONDS):
                fetch(connection, LIMIT_SQL, _limits(limit, for_the_round=True))
            yield connection
            execute(connection, "COMMIT")
        except BaseException:
            with suppress(psycopg.Error):
                execute(connection, "ROLLBACK")
            raise

    @contextmanager
    def single(self) -> Iterator[WatchedConnection]:
        """Like a round, for one statement, which then needs no transaction around it where the session is ours."""
        connection = self.connection
        if connection.is_direct:
            connection.answer_within = self.limit_seconds * ANSWER_FACTOR
            yield connection
        else:
            with self.round():
                yield connection

    def close(self) -> None:
        """Close the connection if there is one; the next use opens another."""
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _connect(self) -> WatchedConnection:
        wrapper = connections[self._alias]
        parameters = wrapper.get_connection_params()
        for django_only in ("context", "cursor_factory"):
            parameters.pop(django_only, None)
        parameters = {**_DEFAULTS, **parameters, "application_name": self._application_name}
        parameters["connect_timeout"] = _connect_seconds(parameters, self.limit_seconds)
        parameters.pop("prepare_threshold", None)  # each statement says for itself
        connection = WatchedConnection.connect(**parameters, autocommit=True)
        self._connection = connection  # from here on it can be broken off
        try:
            if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):
                connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
            if not is_pooled(connection):
                execute(connection, SESSION_SQL)
                fetch(connection, LIMIT_SQL, _limits(self.limit_seconds, for_the_round=False))
                connection.is_direct = True
        except psycopg.Error:
            connection.close()
            raise
        return connection


def is_pooled(connection: psycopg.Connection) -> bool:
    """Whether the process that answers is not the one that the server named when the connection was made."""
    return connection.info.backend_pid != fetch(connection, "SELECT pg_backend_pid()", {})[0][0]


def _limits(seconds: float, *, for_the_round: bool) -> dict[str, Any]:
    idle_seconds = max(seconds, SHORTEST_IDLE_LIMIT_SECONDS)
    return {
        "milliseconds": f"{seconds * 1000:.0f}",
        "idle_milliseconds": f"{idle_seconds * 1000:.0f}",
        "for_the_round": for_the_round,
    }


def _connect_seconds(parameters: dict[str, Any], limit_seconds: float) -> int:
    """For one host: what DATABASES says, but so that all hosts together stay within `LONGEST_CONNECT_SECONDS`."""
    hosts = str(parameters.get("hostaddr") or parameters.get("host") or os.environ.get("PGHOST", "")).count(",") + 1
    share = min(LONGEST_CONNECT_SECONDS / (hosts * ADDRESSES_OF_A_HOST), limit_seconds)
    wanted = int(parameters["connect_timeout"])  # 0: for ever
    return int(max(min(wanted or share, share), SHORTEST_CONNECT_SECONDS))


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
            is_away = isinstance(error, AWAY)
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
    if isinstance(error, AWAY):
        return f"The database is not available ({text})."
    return f"The database is there, and something fails ({type(error).__name__}: {text})."
