"""
A statement that a session keeps, read and planned once.

To read and to plan the INSERT of a job takes the server about as long as to do it. A session that has run it a few
times is therefore given the statement under a name, and from then on told to execute that: PREPARE and EXECUTE in
SQL, so that Django's cursors, and whoever looks on, see these like any other statement.

It must not matter whether the session still has it: ``DISCARD ALL`` takes it away. So EXECUTE is sent in autocommit
only, where the statement in full can follow if there is nothing to execute; in a transaction, that error would be
the end of it. And only to a session that is the client's own: behind a pooler, others would meet what is prepared.
"""

from collections.abc import Mapping
from typing import Any

import django.db
from psycopg import ClientCursor
from psycopg.pq import TransactionStatus

from .database import execute, fetch, sqlstate_of

USES = 5  # in full, before it is prepared: psycopg's number, too

_PREPARED, _NEVER = USES + 1, -1  # what stands in place of the uses so far
_GONE = frozenset({"26000", "0A000"})  # no such statement; or its columns have other types now


class Prepared:
    """The statement *sql*, for which *name* will stand in sessions; *types* are those of its parameters, in order."""

    def __init__(self, name: str, sql: str, types: Mapping[str, str]) -> None:
        self.sql = sql
        places = {parameter: f"${place}" for place, parameter in enumerate(types, start=1)}
        self._prepare_sql = f"PREPARE {name} ({', '.join(types.values())}) AS {sql % places}"
        self._execute_sql = f"EXECUTE {name} ({', '.join(f'%({parameter})s' for parameter in types)})"
        self._uses = f"_uses_of_{name}"  # an attribute of psycopg's connection, which ends when the session does

    def fetch(self, connection: Any, parameters: Mapping[str, Any]) -> list[tuple]:
        """Run it on *connection*, Django's or psycopg's, and return its rows."""
        session = getattr(connection, "connection", None)
        # Django may not have begun its transaction yet, and does not know of one that was begun by hand.
        if session is None or not connection.autocommit or session.pgconn.transaction_status != TransactionStatus.IDLE:
            return fetch(connection, self.sql, parameters)
        uses = getattr(session, self._uses, 0)
        if 0 <= uses < USES:
            setattr(session, self._uses, uses + 1)
        elif uses == USES:
            uses = _PREPARED if self._prepare(connection, session) else _NEVER
            setattr(session, self._uses, uses)
        if uses == _PREPARED:
            try:
                return fetch(connection, self._execute_sql, parameters)
            except django.db.Error as error:
                if sqlstate_of(error) not in _GONE:
                    raise
                setattr(session, self._uses, _NEVER)  # whoever took it away may do so again
        return fetch(connection, self.sql, parameters)

    def forget(self, session: Any) -> None:
        """Note that *session*, a connection of psycopg, has nothing prepared any more."""
        setattr(session, self._uses, 0)

    def _prepare(self, connection: Any, session: Any) -> bool:
        """Prepare it if it can stay; return whether it has been."""
        # EXECUTE takes values, no places for them; and psycopg, if it prepares by itself, takes all away now and then.
        if session.prepare_threshold is not None or not issubclass(session.cursor_factory, ClientCursor):
            return False
        if session.info.backend_pid != fetch(connection, "SELECT pg_backend_pid()", {})[0][0]:  # a pooler
            return False
        execute(connection, self._prepare_sql)
        return True
