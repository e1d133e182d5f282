"""
Producers: threads that enqueue jobs as applications do, and keep books about what they were told.

Each enqueue has a token of its own, which the job carries as its argument. A producer whose COMMIT got no answer
does not know what it has done, and says so; the verdict looks afterwards whether the job is there.
"""

import enum
import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import django.db
from django.db import connection, transaction

from .kinds import KINDS

PAUSE_AFTER_ERROR_SECONDS = 0.2
HIGH_TIDE = 300  # jobs that wait or run; from here on producers wait

LIVE_SQL = "SELECT count(*) FROM django_pgqueue_job WHERE status IN ('pending', 'running')"


class Fate(enum.Enum):
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"  # a COMMIT was sent and not answered


class Entry(NamedTuple):
    kind: str
    fate: Fate


class Ledger:
    """By token, what became of each enqueue as far as its producer knows."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def note(self, tokens: list[str], kind: str, fate: Fate) -> None:
        self.entries.update(dict.fromkeys(tokens, Entry(kind, fate)))


class RolledBack(Exception):
    """Raised on purpose, to end a transaction."""


class Producer(threading.Thread):
    def __init__(self, number: int, seed: int, ledger: Ledger) -> None:
        super().__init__(name=f"chaos-producer-{number}", daemon=True)
        self._number = number
        self._random = random.Random(f"{seed} producer {number}")
        self._ledger = ledger
        self._count = 0
        self._stopping = threading.Event()
        self.is_held_back = False  # by too many jobs

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        ways = (self.enqueue_one, self._in_transaction, self._many, self._rolled_back, self._savepoint)
        while not self._stopping.wait(self._random.uniform(0, 0.05)):
            if self.is_held_back:
                time.sleep(0.05)
                continue
            kind = self._random.choices([*KINDS], [kind.share for kind in KINDS.values()])[0]
            try:
                self._random.choices(ways, (50, 15, 10, 15, 10))[0](kind)
            except RolledBack:
                pass
            except django.db.Error:
                connection.close()
                self._stopping.wait(PAUSE_AFTER_ERROR_SECONDS)
        connection.close()

    def enqueue_one(self, kind: str) -> str:
        """In autocommit: the statement is the transaction. Return the job's token."""
        tokens = self._tokens(1)
        self._ledger.note(tokens, kind, Fate.UNKNOWN)
        self._enqueue(kind, tokens)
        self._ledger.note(tokens, kind, Fate.COMMITTED)
        return tokens[0]

    def _in_transaction(self, kind: str) -> None:
        self._transaction(kind, self._tokens(self._random.randint(1, 3)), self._enqueue)

    def _many(self, kind: str) -> None:
        self._transaction(kind, self._tokens(self._random.randint(5, 15)), self._enqueue_many)

    def _rolled_back(self, kind: str) -> None:
        tokens = self._tokens(self._random.randint(1, 5))
        self._ledger.note(tokens, kind, Fate.ROLLED_BACK)
        with transaction.atomic():
            self._enqueue(kind, tokens)
            raise RolledBack

    def _savepoint(self, kind: str) -> None:
        """What stands before and after an inner block that is rolled back is committed."""
        before, inside, after = (self._tokens(self._random.randint(1, 2)) for _ in range(3))
        self._ledger.note(inside, kind, Fate.ROLLED_BACK)

        def enqueue(kind: str, tokens: list[str]) -> None:
            self._enqueue(kind, before)
            try:
                with transaction.atomic():
                    self._enqueue(kind, inside)
                    raise RolledBack
            except RolledBack:
                self._enqueue(kind, after)

        self._transaction(kind, before + after, enqueue)

    def _transaction(self, kind: str, tokens: list[str], enqueue: Callable[[str, list[str]], None]) -> None:
        self._ledger.note(tokens, kind, Fate.ROLLED_BACK)
        with transaction.atomic():
            enqueue(kind, tokens)
            self._ledger.note(tokens, kind, Fate.UNKNOWN)  # from here on, the COMMIT may have been sent
        self._ledger.note(tokens, kind, Fate.COMMITTED)

    def _enqueue(self, kind: str, tokens: list[str]) -> None:
        for token in tokens:
            _task(kind).enqueue(token)

    def _enqueue_many(self, kind: str, tokens: list[str]) -> None:
        _task(kind).enqueue_many([[token] for token in tokens])

    def _tokens(self, count: int) -> list[str]:
        self._count += count
        return [f"{self._number}-{number}" for number in range(self._count - count + 1, self._count + 1)]


def _task(kind: str):
    from . import tasks  # once Django is set up

    return getattr(tasks, kind)
