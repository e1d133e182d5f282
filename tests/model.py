"""
The queue in plain Python: what every verb must do to rows, with exact moments and without a database.

One actor may have a transaction open. What it has written only it sees until it commits, and what it has
locked the others pass over. They commit at once, so that nobody ever waits for them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from django_pgqueue.managers import Changed
from django_pgqueue.outcomes import Claim, Failed, Outcome, Released, Retried, Snoozed, Succeeded
from django_pgqueue.statements import people

LIVE = ("pending", "held", "running")
FINISHED = ("done", "failed", "cancelled")

MAX_REFUNDS = 1  # instead of twenty: no example is that long


class Attempt(NamedTuple):
    """A row of JobAttempt."""

    version: int
    number: int
    outcome: str
    counted: bool


@dataclass(frozen=True)
class Row:
    """A row of Job. Moments are seconds since the beginning of the example."""

    id: int
    queue: str
    priority: int
    key: str | None
    max_attempts: int
    available: float
    status: str = "pending"
    attempts: int = 0
    version: int = 0
    snoozes: int = 0
    owner: str | None = None
    claimed: float | None = None
    lease: float | None = None
    started: float | None = None
    finished: float | None = None
    result: int | None = None
    history: tuple[Attempt, ...] = ()

    @property
    def claim(self) -> Claim:
        return Claim(self.id, self.version)

    @property
    def refunds(self) -> int:
        return sum(not attempt.counted for attempt in self.history)

    def recorded(self, outcome: str, counted: bool = True) -> tuple[Attempt, ...]:
        return (*self.history, Attempt(self.version, self.attempts, outcome, counted))


@dataclass
class Transaction:
    """What the open transaction has done: rows written (``None``: deleted), rows locked, keys of rows locked."""

    written: dict[int, Row | None] = field(default_factory=dict)
    locked: set[int] = field(default_factory=set)
    key_locked: set[int] = field(default_factory=set)


class Queue:
    """What is committed, the transaction that is not, and the time."""

    def __init__(self) -> None:
        self.now = 0
        self.committed: dict[int, Row] = {}
        self.open: Transaction | None = None

    def inside(self) -> "Side":
        """As the actor with the transaction meets it, while it is open."""
        return Side(self, mine=self.open, foreign=Transaction())

    def outside(self) -> "Side":
        """As all others meet it."""
        return Side(self, mine=None, foreign=self.open or Transaction())

    def end_transaction(self, *, commit: bool) -> None:
        assert self.open is not None
        if commit:
            written = {**self.committed, **self.open.written}
            self.committed = {job_id: row for job_id, row in written.items() if row is not None}
        self.open = None


class Side:
    """The queue as one actor meets it: *mine* is its own transaction, *foreign* that of another."""

    def __init__(self, queue: Queue, mine: Transaction | None, foreign: Transaction) -> None:
        self._queue = queue
        self._mine = mine
        self._foreign = foreign
        self.now = queue.now

    # ---- rows

    def rows(self) -> dict[int, Row]:
        written = self._mine.written if self._mine else {}
        visible = {**self._queue.committed, **written}
        return {job_id: visible[job_id] for job_id in sorted(visible) if visible[job_id] is not None}

    def get(self, job_id: int) -> Row | None:
        return self.rows().get(job_id)

    def is_free(self, job_id: int) -> bool:
        return job_id not in self._foreign.locked

    def lock(self, job_id: int) -> None:
        if self._mine is not None:
            self._mine.locked.add(job_id)

    def write(self, job_id: int, row: Row | None) -> None:
        self.lock(job_id)
        if self._mine is not None:
            self._mine.written[job_id] = row
        elif row is None:
            del self._queue.committed[job_id]
        else:
            self._queue.committed[job_id] = row

    def _some(self, ids: Iterable[int], statuses: Collection[str]) -> list[Row]:
        """The free rows among *ids* in one of *statuses*, in the order of their ids."""
        rows = self.rows()
        wanted = (rows[job_id] for job_id in sorted(set(ids)) if job_id in rows)
        return [row for row in wanted if row.status in statuses and self.is_free(row.id)]

    def _holders(self, key: str | None) -> list[Row]:
        return [row for row in self.rows().values() if key and row.key == key and row.status in LIVE]

    # ---- enqueue

    def would_wait_for_key(self, key: str | None) -> bool:
        """Whether another transaction is about to take or to free *key*."""
        return key is not None and any(
            row is not None and row.key == key and job_id in self._foreign.written
            for source in (self._foreign.written, self._queue.committed)
            for job_id, row in source.items()
        )

    def enqueue(self, row: Row) -> bool:
        """Whether *row* is new; else a live job has its key."""
        if self._holders(row.key):
            return False
        self.write(row.id, row)
        return True

    def holder(self, key: str | None) -> Row | None:
        return next(iter(self._holders(key)), None)

    # ---- claim, renew

    def claim(self, owner: str, limit: int, queues: Sequence[str] | None, lease: int) -> list[Row]:
        """The claimed rows in the order in which they are handed over."""
        bands: dict[tuple[str, int], list[Row]] = {}
        for row in self.rows().values():
            if row.status == "pending" and (queues is None or row.queue in queues):
                bands.setdefault((row.queue, row.priority), []).append(row)
        waiting = [sorted(band, key=_by_moment) for band in bands.values()]
        waiting = [band for band in waiting if band[0].available <= self.now]
        waiting.sort(key=lambda band: (-band[0].priority, *_by_moment(band[0])))
        due = [row for band in waiting for row in band if row.available <= self.now and self.is_free(row.id)]
        claimed = [
            replace(
                row,
                status="running",
                attempts=row.attempts + 1,
                version=row.version + 1,
                owner=owner,
                claimed=self.now,
                lease=self.now + lease,
                started=self.now if row.started is None else row.started,
            )
            for row in due[:limit]
        ]
        for row in claimed:
            self.write(row.id, row)
        return sorted(claimed, key=lambda row: (-row.priority, *_by_moment(row)))

    def standing(self, claims: Iterable[Claim]) -> set[int]:
        rows = self.rows()
        return {claim.job_id for claim in claims if _holds(rows.get(claim.job_id), claim)}

    def renew(self, claims: Iterable[Claim], lease: int) -> set[int]:
        renewed = {job_id for job_id in self.standing(claims) if self.is_free(job_id)}
        for job_id in renewed:
            self.write(job_id, replace(self.rows()[job_id], lease=self.now + lease))
        return renewed

    # ---- settle

    def settle(self, outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
        """What becomes of each outcome: settled, busy or lost."""
        answers: dict[str, list[Outcome]] = {"settled": [], "busy": [], "lost": []}
        for outcome in outcomes:
            row = self.get(outcome.claim.job_id)
            if row is not None and _holds(row, outcome.claim):
                if self.is_free(row.id):
                    self.write(row.id, self._ended(row, outcome))
                answers["settled" if self.is_free(row.id) else "busy"].append(outcome)
            elif row is not None and row.version == outcome.claim.version and row.status in _as_written(outcome):
                answers["settled"].append(outcome)
            elif row is not None and row.version == outcome.claim.version and row.status == "done":
                answers["settled"].append(Succeeded(outcome.claim))  # by its own atomic task
            else:
                answers["lost"].append(outcome)
        return answers

    def _ended(self, row: Row, outcome: Outcome) -> Row:
        ended = replace(row, lease=None)
        match outcome:
            case Succeeded():
                result = None if outcome.result is None else int(outcome.result)
                return replace(ended, status="done", finished=self.now, result=result)
            case Retried():
                available = self.now + outcome.delay_seconds
                return replace(ended, status="pending", available=available, history=row.recorded("error"))
            case Snoozed():
                return replace(
                    ended,
                    status="pending",
                    available=self.now + outcome.delay_seconds,
                    attempts=row.attempts - 1,
                    snoozes=row.snoozes + 1,
                )
            case Failed():
                return replace(ended, status="failed", finished=self.now, history=row.recorded("error"))
            case Released():
                back = replace(
                    ended,
                    status="pending",
                    version=row.version + 1,
                    available=max(row.available, self.now + outcome.delay_seconds),
                )
                if not outcome.started:
                    started = row.started if row.attempts > 1 else None
                    return replace(back, attempts=row.attempts - 1, started=started)
                if row.refunds < MAX_REFUNDS:
                    return replace(back, attempts=row.attempts - 1, history=row.recorded("released", counted=False))
                back = replace(back, history=row.recorded("released"))
                return back if row.attempts < row.max_attempts else replace(back, status="failed", finished=self.now)

    # ---- recover

    def expired(self) -> list[Row]:
        """The rows that a recovery may take back, those with the longest ended lease first."""
        rows = [row for row in self.rows().values() if row.status == "running" and row.lease < self.now]
        return sorted((row for row in rows if self.is_free(row.id)), key=lambda row: row.lease)

    def owned(self, owner: str, held: Collection[int]) -> list[Row]:
        """The rows that a burial may take back."""
        rows = [row for row in self.rows().values() if row.status == "running" and row.owner.startswith(owner)]
        return [row for row in rows if row.id not in held and self.is_free(row.id)]

    def recover(self, job_id: int, outcome: str, available: float) -> Row:
        """Take one row back; it runs again from *available* on if it has attempts left."""
        row = self.rows()[job_id]
        ended = replace(row, lease=None, version=row.version + 1, history=row.recorded(outcome))
        if row.attempts < row.max_attempts:
            ended = replace(ended, status="pending", available=available)
        else:
            ended = replace(ended, status="failed", finished=self.now)
        self.write(job_id, ended)
        return ended

    # ---- people

    def change(self, verb: people.Verb, ids: Collection[int]) -> tuple[dict[int, bool], Changed]:
        """Do *verb* to many jobs; return those that it changed, by id and whether they ran, and its counts."""
        rows = [row for job_id, row in self.rows().items() if job_id in ids]
        changing = self._some(ids, verb.takes)
        if verb is people.REQUEUE:
            changing = self._first_of_each_key(row for row in changing if not self._holders(row.key))
        for row in changing:
            self.write(row.id, CHANGES[verb](self, row))
        changed = {row.id: row.status == "running" for row in changing}
        left = [row for row in rows if row.id not in changed and row.status in verb.takes]
        key_held = sum(bool([holder for holder in self._holders(row.key) if holder.id != row.id]) for row in left)
        skipped = len(rows) - len(changed) - len(left)
        return changed, Changed(len(changed), len(left) - key_held, skipped, key_held, sum(changed.values()))

    def _first_of_each_key(self, rows: Iterable[Row]) -> list[Row]:
        first: dict[object, Row] = {}
        for row in rows:
            self.lock(row.id)
            first.setdefault(row.key or row.id, row)
        return list(first.values())

    def hold(self, row: Row) -> Row:
        return replace(row, status="held")

    def unhold(self, row: Row) -> Row:
        return replace(row, status="pending", available=max(row.available, self.now))

    def cancel(self, row: Row) -> Row:
        if row.status == "running":
            row = replace(row, lease=None, version=row.version + 1, history=row.recorded("cancelled"))
        return replace(row, status="cancelled", finished=self.now)

    def requeue(self, row: Row) -> Row:
        return replace(
            row,
            status="pending",
            attempts=0,
            snoozes=0,
            version=row.version + 1,
            available=self.now,
            started=None,
            finished=None,
            result=None,
        )

    # ---- prune

    def prune(self, ids: Iterable[int], older_than: int) -> set[int]:
        """Delete the old done jobs among *ids* to which nothing is locked, not even the key."""
        old = [row for row in self._some(ids, ["done"]) if row.finished < self.now - older_than]
        deleted = {row.id for row in old} - self._foreign.key_locked
        for job_id in deleted:
            self.write(job_id, None)
        return deleted


CHANGES: dict[people.Verb, Callable[[Side, Row], Row]] = {
    people.HOLD: Side.hold,
    people.UNHOLD: Side.unhold,
    people.CANCEL: Side.cancel,
    people.REQUEUE: Side.requeue,
}


def _by_moment(row: Row) -> tuple[float, int]:
    return row.available, row.id


def _holds(row: Row | None, claim: Claim) -> bool:
    return row is not None and row.status == "running" and row.claim == claim


def _as_written(outcome: Outcome) -> tuple[str, ...]:
    """Where a row may stand that *outcome* has been written to already, without a new version."""
    match outcome:
        case Succeeded():
            return ("done",)
        case Failed():
            return ("failed",)
        case Retried() | Snoozed():
            return ("pending", "held", "cancelled")
        case _:
            return ()
