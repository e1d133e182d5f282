"""
A statement that a session keeps, read and planned once.

To read and to plan the INSERT of a job takes the server about as long as to do it. A session that has run it a few
times is therefore given the statement under a name, and from then on told to execute that: PREPARE and EXECUTE in
SQL, so that Django's cursors, and whoever looks on, see these like any other statement. What is the same for all
jobs of a task is a part of what is prepared.

It must not matter whether the session still has it: ``DISCARD ALL`` takes it away. So EXECUTE is sent in autocommit
only, where the statement in full can follow if there is nothing to execute; in a transaction, that error would be
the end of it. And only to a session that is the client's own: behind a pooler, others would meet what is prepared.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import django.db
from psycopg import ClientCursor
from psycopg.pq import TransactionStatus

from .database import fetch, sqlstate_of

USES = 5  # in full, before it is prepared,
MOST = 100  # and how many a session keeps: both are psycopg's numbers, too

_GONE = frozenset({"26000", "0A000"})  # no such statement; or its columns have other types now


class Prepared:
    """
    The statement *sql*, for which *name* and a number stand in the sessions that keep it.

    They keep one for each set of values of its *fixed* parameters; the others, *free*, have the types named.
    """

    def __init__(self, name: str, sql: str, fixed: Sequence[str], free: Mapping[str, str]) -> None:
        self._name = name
        self._sql = sql
        self._values_of_fixed = itemgetter(*fixed)
        places = {parameter: f"%({parameter})s" for parameter in fixed}
        places |= {parameter: f"${place}" for place, parameter in enumerate(free, start=1)}
        self._definition = f"({', '.join(free.values())}) AS {sql % places}"
        self._values = f"({', '.join(f'%({parameter})s' for parameter in free)})"

    def fetch(self, connection: Any, parameters: Mapping[str, Any]) -> list[tuple]:
        """Run it on *connection*, Django's or psycopg's, and return its rows."""
        session = getattr(connection, "connection", None)
        # Django may not have begun its transaction yet, and does not know of one that was begun by hand.
        if session is None or not connection.autocommit or session.pgconn.transaction_status != TransactionStatus.IDLE:
            return fetch(connection, self._sql, parameters)
        kept = getattr(session, self._name, None) or self.forget(session)
        fixed = self._values_of_fixed(parameters)
        execute_sql = kept.execute_sql.get(fixed)
        if execute_sql is None and kept.is_time_for(fixed) and kept.is_possible(connection, session):
            execute_sql = kept.execute_sql[fixed] = self._prepare(connection, parameters, len(kept.execute_sql))
        if execute_sql is not None:
            try:
                return fetch(connection, execute_sql, parameters)
            except django.db.Error as error:
                if sqlstate_of(error) not in _GONE:
                    raise
                kept.give_up()
        return fetch(connection, self._sql, parameters)

    def forget(self, session: Any) -> "_Kept":
        """Note that *session*, a connection of psycopg, has nothing prepared, not yet or no longer."""
        kept = _Kept()
        setattr(session, self._name, kept)  # there, since it ends when the session does
        return kept

    def _prepare(self, connection: Any, parameters: Mapping[str, Any], number: int) -> str:
        """Prepare it with its fixed *parameters*, and return what executes it."""
        with connection.cursor() as cursor:
            cursor.execute(f"PREPARE {self._name}_{number} {self._definition}", parameters)
        return f"EXECUTE {self._name}_{number} {self._values}"


class _Kept:
    """What a session keeps of a statement: *execute_sql*, by the values of its fixed parameters."""

    def __init__(self) -> None:
        self.execute_sql: dict[tuple, str] = {}
        self._uses: Counter[tuple] = Counter()
        self._is_possible: bool | None = None  # None while nobody has asked

    def is_time_for(self, fixed: tuple) -> bool:
        """Note that the statement is used with these values; return whether it was often enough before."""
        if len(self._uses) == MOST and fixed not in self._uses:
            return False
        self._uses[fixed] += 1
        return self._uses[fixed] > USES

    def is_possible(self, connection: Any, session: Any) -> bool:
        """Whether what is prepared on *connection* stays in its *session*, and can be executed there."""
        if self._is_possible is None:
            self._is_possible = (
                # EXECUTE takes values, no places for them; and psycopg, if it prepares, takes all away now and then.
                session.prepare_threshold is None
                and issubclass(session.cursor_factory, ClientCursor)
                # Else a pooler answers.
                and session.info.backend_pid == fetch(connection, "SELECT pg_backend_pid()", {})[0][0]
            )
        return self._is_possible

    def give_up(self) -> None:
        """Prepare nothing any more: whoever took it away may do so again."""
        self._is_possible = False
        self.execute_sql.clear()
