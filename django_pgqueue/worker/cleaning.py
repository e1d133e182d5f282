"""
Leave a thread's database connections as the next task expects them.

A task may leave a transaction open, a ``SET``, another role, a temporary table, a broken connection. The
next one, perhaps of another tenant, must not meet any of it.
"""

import logging
import select
from contextlib import suppress
from typing import Any

from django.db import connections

from ..statements.enqueue import INSERT
from . import wrappers

logger = logging.getLogger("django_pgqueue")


def begin_fresh() -> None:
    """
    Let go of connections that have ended or grown too old while no job ran.

    Django does a part of this before each request. Nobody can run a failed task again as cheaply as a person
    reloads a page, so a restart of the database is looked for, too.
    """
    for connection in wrappers.here():
        if connection.connection is None:
            continue
        try:
            if _has_ended(connection):
                _drop(connection)
            else:
                connection.close_if_unusable_or_obsolete()
        except Exception:
            _drop(connection)


def leave_clean(*, may_keep: bool = True, may_use: bool = True) -> None:
    """
    Close the calling thread's connections, or reset those that DATABASES says to keep.

    Unless it *may_keep* them, because the thread ends: nobody would close them. Unless it *may_use* them,
    because the task was interrupted: one may be in the middle of a command.
    """
    mine = wrappers.here()
    for connection in mine:
        try:
            if connection.connection is not None:
                if may_use:
                    _clean(connection, may_keep)
                else:
                    _drop(connection)
        except Exception:
            # Whatever is wrong with it, a new one takes its place.
            logger.debug("Dropping a connection to %r that could not be cleaned.", connection.alias, exc_info=True)
            _drop(connection)
        finally:
            connection.queries_log.clear()  # of DEBUG, which would grow for as long as the worker lives
    if len(mine) != len(connections.settings):  # a task has put another in the place of one
        wrappers.forget()


def _has_ended(connection: Any) -> bool:
    """Whether an idle connection has something to say, without asking it: that can only be goodbye."""
    raw = connection.connection
    if connection.vendor != "postgresql":
        return False
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _clean(connection: Any, may_keep: bool) -> None:
    if connection.in_atomic_block or not connection.get_autocommit() or connection.closed_in_transaction:
        _drop(connection)
    elif connection.settings_dict["OPTIONS"].get("pool"):
        # Django's pool hands sessions on as they are.
        _reset(connection)
        connection.close()
    elif may_keep and (connection.close_at is None or connection.settings_dict["CONN_MAX_AGE"]):
        connection.close_if_unusable_or_obsolete()
        if connection.connection is not None:
            _reset(connection)
    else:
        connection.close()


def _reset(connection: Any) -> None:
    if connection.vendor != "postgresql":
        return
    with connection.cursor() as cursor:
        cursor.execute("DISCARD ALL")
    INSERT.forget(connection.connection)
    connection._configure_connection(connection.connection)  # the time zone and the role, as at its start


def _drop(connection: Any) -> None:
    """Close for real and let Django make a new wrapper: this one may believe that it is in a transaction."""
    raw = connection.connection
    with suppress(Exception):  # nothing depends on it any more
        if raw is not None:
            raw.close()
            connection.close()
    wrappers.replace(connection)
