"""
The supervisor's thread that waits for notifications, minds the `Doorbell`, and has claims looked at.

A notification is only a hint: the claim decides, and polling bounds every gap. So nothing is done about a
missed one, and where none can arrive, behind a pooler that gives each transaction another session, the worker
still works. Whether they arrive is tried out, since a pooler does not say what it is; and there are no locks there.
"""

import logging
import os
import random
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psycopg

from ..statements.bell import HANDOVER_CHANNEL
from ..statements.database import CANCEL_CHANNEL, CHANNEL, execute
from .config import WorkerConfig
from .connection import Outage, Session, WatchedConnection
from .doorbell import Doorbell
from .process import ChildProcess

logger = logging.getLogger("django_pgqueue")

CHECK_SECONDS = 10.0  # between two questions, for a silent connection may be a dead one
PROBE_SECONDS = 5.0  # for a notification of our own to arrive
PROBE_AGAIN_SECONDS = 600.0


class Listener(threading.Thread):
    """
    Calls *wake* when a child should claim, *look* when one should look, and *check_claims* after a notification that
    running jobs were cancelled. *children* returns those that live now.
    """

    def __init__(
        self,
        config: WorkerConfig,
        children: Callable[[], list[ChildProcess]],
        wake: Callable[[], None],
        look: Callable[[], None],
        check_claims: Callable[[], None],
    ) -> None:
        super().__init__(name="pgqueue-listener", daemon=True)
        self._config = config
        self._wake = wake
        self._check_claims = check_claims
        self._session = Session(config.database, f"pgqueue listener {os.getpid()}")
        self._probing = Session(config.database, f"pgqueue probe {os.getpid()}")
        self._waiter = Session(config.database, f"pgqueue bell {os.getpid()}")
        self._doorbell = Doorbell(config, children, wake, look, self._waiter)
        self._heard: list[psycopg.Notify] = []
        self._alarm: socket.socket | None = None  # from the beginning of the thread to its end
        self._alarm_writer: socket.socket | None = None
        self._outage = Outage(logging.DEBUG)
        self._has_warned = False
        self._stopping = threading.Event()

    @property
    def sessions(self) -> list[Session]:
        """For the watchdog."""
        return [self._session, self._probing, self._waiter]

    def stop(self) -> None:
        """End soon; to be joined by nobody who is in a hurry."""
        self._stopping.set()
        self._wake_up()

    def retire(self) -> None:
        """No more jobs are claimed here: let other workers be rung."""
        self._doorbell.retire()
        self._wake_up()

    def something_happened(self, *, more_jobs: bool = False) -> None:
        """A child has begun to rest, has died, or has found *more jobs* than it can take."""
        if more_jobs:
            self._doorbell.more_jobs()
        self._wake_up()

    def _wake_up(self) -> None:
        writer = self._alarm_writer
        if writer is not None:
            with suppress(OSError):  # a full pipe wakes, too; a closed one has nobody behind it
                writer.send(b"!")

    def run(self) -> None:
        self._alarm, self._alarm_writer = socket.socketpair()
        self._alarm.setblocking(False)
        self._alarm_writer.setblocking(False)
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
        self._alarm.close()
        self._alarm_writer.close()

    def _listen(self) -> None:
        connection = self._session.connection
        if not connection.is_direct and not self._can_hear(connection):
            self._outage.over()
            self._do_without()
            return
        # By a handler, since some come with the answers to other questions.
        connection.add_notify_handler(self._heard.append)
        execute(connection, f"LISTEN {CHANNEL}; LISTEN {CANCEL_CHANNEL}; LISTEN {HANDOVER_CHANNEL}")
        self._doorbell.open(connection)
        self._outage.over()
        if self._has_warned:
            self._has_warned = False
            logger.info("Notifications arrive now.")
        self._wake()  # what was enqueued while nobody listened
        check_at = time.monotonic() + CHECK_SECONDS
        while not self._stopping.is_set():
            self._heed(connection.info.backend_pid)
            pause = self._doorbell.turn()
            if not self._heard:
                self._wait(connection, min(pause, max(check_at - time.monotonic(), 0.0)))
            if time.monotonic() > check_at:
                connection.execute("SELECT 1")
                self._doorbell.check()
                check_at = time.monotonic() + CHECK_SECONDS

    def _wait(self, connection: WatchedConnection, seconds: float) -> None:
        """Until something is heard, or happens, and *seconds* at most."""
        assert self._alarm is not None
        select.select([connection.fileno(), self._alarm.fileno(), *self._doorbell.waits_at], [], [], seconds)
        with suppress(BlockingIOError):
            self._alarm.recv(4096)
        connection.pgconn.consume_input()  # raises if the connection is lost
        while (notification := connection.pgconn.notifies()) is not None:
            channel, payload = (text.decode(connection.info.encoding) for text in notification[::2])
            self._heard.append(psycopg.Notify(channel, payload, notification.be_pid))

    def _heed(self, own_pid: int) -> None:
        """Do what the notifications call for that have arrived; what has arrived together wakes once."""
        heard, self._heard[:] = list(self._heard), []
        if any(notification.channel == CANCEL_CHANNEL for notification in heard):
            self._check_claims()
        if any(notification.channel == HANDOVER_CHANNEL and notification.pid != own_pid for notification in heard):
            self._doorbell.handed_over()
        serves = self._config.queues.serves
        if rings := sum(notification.channel == CHANNEL and serves(notification.payload) for notification in heard):
            self._doorbell.rang(rings)

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
        self._doorbell.close()
        self._heard.clear()
        for session in self.sessions:
            session.close()
