"""
The endings that a child has still to write.

Most are written in the next round, all at once. Where someone holds the row of one, a person perhaps, and perhaps for
hours, it is set apart and tried again by itself, without waiting, so that it keeps neither the others nor the
claims that a round makes.
"""

import time
from collections.abc import Iterable

import psycopg

from ..outcomes import Outcome
from ..statements.settle import Settlement, settle, settle_carefully
from .connection import Session

BUSY_PAUSE_SECONDS = 0.2  # before the next try to settle a row that someone holds


class Settler:
    """For the control loop, on its *session*."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ready: list[Outcome] = []
        self._writing: list[Outcome] = []  # in a transaction that is not committed
        self._busy: list[Outcome] = []
        self._busy_at = 0.0  # monotonic; when to try those again
        self.since = 0.0  # monotonic; when the first of those that are ready arrived

    def __len__(self) -> int:
        return len(self._ready) + len(self._writing) + len(self._busy)

    @property
    def ready(self) -> int:
        """How many a round would write."""
        return len(self._ready)

    @property
    def next_at(self) -> float:
        """When there is something to write, by the monotonic clock; ``inf`` for nothing."""
        return 0.0 if self._ready else self._busy_at if self._busy else float("inf")

    def add(self, outcomes: Iterable[Outcome]) -> None:
        if not self._ready:
            self.since = time.monotonic()
        self._ready += outcomes

    def write(self, connection: psycopg.Connection) -> Settlement:
        """Write what is ready, in the transaction that is open; `done` once that is committed, else `failed`."""
        self._writing, self._ready = self._ready, []
        return settle(connection, self._writing) if self._writing else Settlement()

    def done(self, settlement: Settlement) -> None:
        """What `write` has written is committed, as *settlement* says."""
        self._writing = []
        self._set_apart(settlement.busy)

    def failed(self) -> None:
        """What `write` has written is rolled back, or nobody knows."""
        self._ready = self._writing + self._ready
        self._writing = []

    def write_carefully(self) -> Settlement:
        """Write what is ready one way or the other, after `failed`."""
        settlement = settle_carefully(self._session.connection, self._ready, self._session.round)
        self._ready = []
        self._set_apart(settlement.busy)
        return settlement

    def try_busy(self) -> Settlement:
        """Write those that were busy, if it is time to and their rows are free by now."""
        if not self._busy or time.monotonic() < self._busy_at:
            return Settlement()
        settlement = settle_carefully(self._session.connection, self._busy, self._session.round)
        self._busy = []
        self._set_apart(settlement.busy)
        return settlement

    def _set_apart(self, busy: list[Outcome]) -> None:
        if busy:
            self._busy += busy
            self._busy_at = time.monotonic() + BUSY_PAUSE_SECONDS
