"""
The supervisor's thread that waits for notifications, wakes a child, and has claims looked at.

A notification is only a hint: the claim decides, and polling bounds every gap. So nothing is done about a
missed one, and without a direct connection to the database the worker still works.
"""

import logging
import os
import threading
from collections.abc import Callable

import psycopg

from ..statements.database import CANCEL_CHANNEL, CHANNEL
from .config import WorkerConfig
from .connection import Outage, Session

logger = logging.getLogger("django_pgqueue")

WAIT_SECONDS = 1.0  # between two looks at whether to stop


class Listener(threading.Thread):
    """
    Calls *wake* after a notification for a queue that the worker serves, and after each new connection;
    *check_claims* after one that says that running jobs were cancelled.
    """

    def __init__(self, config: WorkerConfig, wake: Callable[[], None], check_claims: Callable[[], None]) -> None:
        super().__init__(name="pgqueue-listener", daemon=True)
        self._queues = config.queues
        self._wake = wake
        self._check_claims = check_claims
        self.session = Session(config.database, f"pgqueue listener {os.getpid()}")
        self._outage = Outage(logging.DEBUG)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End soon; to be joined by nobody who is in a hurry."""
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except psycopg.Error as error:
                self.session.close()
                self._stopping.wait(self._outage.failed(error))
            except Exception:  # a thread begins here; polling goes on without it
                logger.exception("Listening for notifications failed; trying again.")
                self.session.close()
                self._stopping.wait(1.0)
        self.session.close()

    def _listen(self) -> None:
        connection = self.session.connection
        connection.execute(f"LISTEN {CHANNEL}; LISTEN {CANCEL_CHANNEL}")
        self._outage.over()
        self._wake()  # what was enqueued while nobody listened
        while not self._stopping.is_set():
            # Whatever has arrived together wakes once.
            heard = [*connection.notifies(timeout=WAIT_SECONDS, stop_after=1), *connection.notifies(timeout=0)]
            if any(heard_of.channel == CANCEL_CHANNEL for heard_of in heard):
                self._check_claims()
            if any(heard_of.channel == CHANNEL and self._queues.serves(heard_of.payload) for heard_of in heard):
                self._wake()
