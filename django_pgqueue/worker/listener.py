"""
The supervisor's thread that waits for notifications, wakes a child, and has claims looked at.

A notification is only a hint: the claim decides, and polling bounds every gap. So nothing is done about a
missed one, and where none can arrive, behind a pooler that gives each transaction another session, the worker
still works. Whether they arrive is tried out, since a pooler does not say what it is.
"""

import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable

import psycopg

from ..statements.database import CANCEL_CHANNEL, CHANNEL
from .config import WorkerConfig
from .connection import Outage, Session, WatchedConnection

logger = logging.getLogger("django_pgqueue")

WAIT_SECONDS = 1.0  # between two looks at whether to stop
CHECK_SECONDS = 10.0  # between two questions, for a silent connection may be a dead one
PROBE_SECONDS = 5.0  # for a notification of our own to arrive
PROBE_AGAIN_SECONDS = 600.0


class Listener(threading.Thread):
    """
    Calls *wake* after a notification for a queue that the worker serves, and after each new connection;
    *check_claims* after one that says that running jobs were cancelled.
    """

    def __init__(self, config: WorkerConfig, wake: Callable[[], None], check_claims: Callable[[], None]) -> None:
        super().__init__(name="pgqueue-listener", daemon=True)
        self._config = config
        self._wake = wake
        self._check_claims = check_claims
        self._session = Session(config.database, f"pgqueue listener {os.getpid()}")
        self._probing = Session(config.database, f"pgqueue probe {os.getpid()}")
        self._outage = Outage(logging.DEBUG)
        self._has_warned = False
        self._stopping = threading.Event()

    @property
    def sessions(self) -> list[Session]:
        """For the watchdog."""
        return [self._session, self._probing]

    def stop(self) -> None:
        """End soon; to be joined by nobody who is in a hurry."""
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except psycopg.Error as error:
                self._close()
                self._stopping.wait(self._outage.failed(error))
            except Exception:  # a thread begins here; polling goes on without it
                logger.exception("Listening for notifications failed; trying again.")
                self._close()
                self._stopping.wait(1.0)
        self._close()

    def _listen(self) -> None:
        connection = self._session.connection
        if not connection.is_direct and not self._can_hear(connection):
            self._outage.over()
            self._do_without()
            return
        connection.execute(f"LISTEN {CHANNEL}; LISTEN {CANCEL_CHANNEL}")
        self._outage.over()
        if self._has_warned:
            self._has_warned = False
            logger.info("Notifications arrive now.")
        self._wake()  # what was enqueued while nobody listened
        check_at = time.monotonic() + CHECK_SECONDS
        while not self._stopping.is_set():
            # Whatever has arrived together wakes once.
            heard = [*connection.notifies(timeout=WAIT_SECONDS, stop_after=1), *connection.notifies(timeout=0)]
            if any(heard_of.channel == CANCEL_CHANNEL for heard_of in heard):
                self._check_claims()
            serves = self._config.queues.serves
            if any(heard_of.channel == CHANNEL and serves(heard_of.payload) for heard_of in heard):
                self._wake()
            if time.monotonic() > check_at:
                connection.execute("SELECT 1")
                check_at = time.monotonic() + CHECK_SECONDS

    def _can_hear(self, connection: WatchedConnection) -> bool:
        """
        Whether a notification reaches *connection* while it does nothing.

        It comes from another connection: sent from this one it might be heard with the answer to itself. The
        channel is a private one: the session that a pooler leaves listening must not hear of jobs for ever.
        """
        channel = f"{CHANNEL}_probe_{secrets.token_hex(8)}"
        connection.execute(f"LISTEN {channel}")
        self._probing.connection.execute(f"NOTIFY {channel}")
        self._probing.close()
        heard = list(connection.notifies(timeout=PROBE_SECONDS, stop_after=1))
        connection.execute(f"UNLISTEN {channel}")
        return bool(heard)

    def _do_without(self) -> None:
        self._close()
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Notifications do not arrive: there seems to be a pooler in transaction mode before database %r. "
                "Jobs are found by polling, every %g s, and running ones hear late of a cancellation. Let the worker "
                "connect directly, or through a pool in session mode, and both happen at once.",
                *(self._config.database, self._config.poll),
            )
        self._stopping.wait(PROBE_AGAIN_SECONDS * random.uniform(0.8, 1.2))

    def _close(self) -> None:
        for session in self.sessions:
            session.close()
