"""
What a child knows of the bands it serves, so that it does not walk the same dead index entries twice.

A band's floor is the place below which no pending job was seen. Claims raise it to the last job they took. It is
a hint, and wrong now and then: a transaction that was open for a while commits a job from before, a claim is rolled
back. So a claim begins some of its own jobs below the floor, and walks once more over what they have left: where
transactions are short, it needs nothing else to meet those that come late. And the child *looks* below the floors
whenever a claim has found less than it asked for, and now and then while it is busy; and whenever a look was
dear, it pays for it by waiting many times as long before the next.

Once looking is dear it comes in two kinds. What commits late is rarely old, so a look reaches back some
seconds only, as far as it is cheap. What lies before that is looked at behind it, from new to old, a piece at a time.
"""

import time
from bisect import bisect_left, insort
from collections.abc import Sequence

from ..statements.claim import Band, ClaimedJob, Part, Sweep, sweep_parts
from ..statements.database import Connection
from .config import Queues

IDLE_PAUSES = 20  # in times of what the last look took
BUSY_PAUSES = 100
FREE_SECONDS = 0.002  # of each, which it takes when there is nothing to walk over
SHORTEST_IDLE_PAUSE_SECONDS = 0.004
SHORTEST_BUSY_PAUSE_SECONDS = 0.1
CHEAP_SECONDS = 0.004
DEAREST_SECONDS = 0.25  # more is no more: a machine may stand still, and looks that are dear soon reach less far
DEAR_SECONDS = 0.008  # twice in a row: the first time may be anything
SHORTEST_REACH_SECONDS = 1.0
REACH_GROWTH = 4.0
REACH_PATIENCE_SECONDS = 30.0  # after a look that reached too far
PIECE_SECONDS = 0.02  # of what lies behind, at a time
CLOSE_BEHIND = 128  # a claim begins so many jobs below its floor, a second at most: most that commit late are there
MARGIN_SECONDS = 1.0  # a floor that is raised stays so far behind the clock: younger transactions need no look
FORGET_SECONDS = 2.0  # a band that is empty for so long
FORGET_DEAR_SECONDS = 600.0  # the same when finding it again would be dear

INFINITY = float("inf")


class Floors:
    """
    For one control loop. *share* is how many of them look for jobs in one worker: together they look as often
    as one would.
    """

    def __init__(self, queues: Queues, share: int = 1) -> None:
        self._queues = queues
        self._share = share
        self._bands: dict[tuple[str, int], Band] = {}
        self._lowered: dict[tuple[str, int], tuple[float, int]] = {}  # since the last claim; the floors before
        self._latest: dict[tuple[str, int], list[tuple[float, int]]] = {}  # jobs that were claimed, in their order
        self._seen_at: dict[tuple[str, int], float] = {}  # monotonic
        self._clock_offset = 0.0  # from the monotonic clock to the database's, in seconds
        self._last_look = -INFINITY  # the last time, by the database's clock
        self._may_look_at = 0.0  # these four: monotonic
        self._look_at = 0.0
        self._look_behind_at = 0.0
        self._may_reach_further_at = 0.0
        self._reach = INFINITY  # how many seconds before now a look begins
        self._was_dear = False  # the last look
        self._took = 0.0  # the same, in seconds
        self._behind_until: float | None = None  # where the next piece behind ends, by the database's clock
        self._behind_width = SHORTEST_REACH_SECONDS
        self._oldest = INFINITY  # that this child has met, by the database's clock

    def bands(self) -> list[Band]:
        """The bands as a claim serves them: highest priority first, then longest waiting, each from a bit below."""
        ordered = sorted(self._bands.values(), key=lambda band: (-band.priority, band.floor_at, band.floor_id))
        return [self._from_below(band) for band in ordered]

    def _from_below(self, band: Band) -> Band:
        latest = self._latest.get((band.queue_name, band.priority))
        if not latest or latest[0] >= (band.floor_at, band.floor_id):
            return band
        return band._replace(floor_at=latest[0][0], floor_id=latest[0][1])

    def claimed(self, jobs: Sequence[ClaimedJob], wanted: int, took: float) -> None:
        """
        Learn from a claim of *wanted* jobs, which took so many seconds and got *jobs*, sorted as `claim` does.

        Where a look has lowered a floor, the claim has walked over all that lies above it. If it has met the end,
        the floor is where it was before: what a look sees and a claim does not get is locked, perhaps for hours.
        """
        last = {(job.queue_name, job.priority): (job.available_at, job.id) for job in jobs}
        if self._lowered:
            self._charge(took)
            if len(jobs) < wanted:
                for place, before in self._lowered.items():
                    last[place] = max(before, last.get(place, before))
                self._lowered.clear()
        for place, (floor_at, floor_id) in last.items():
            self._lowered.pop(place, None)
            band = self._bands.get(place)
            if band is not None and (floor_at, floor_id) > (band.floor_at, band.floor_id):  # or it came late
                self._bands[place] = band._replace(floor_at=floor_at, floor_id=floor_id)
        self._remember(jobs)

    def _remember(self, jobs: Sequence[ClaimedJob]) -> None:
        most = max(CLOSE_BEHIND // self._share, 1)
        for job in jobs[-most:]:
            latest = self._latest.setdefault((job.queue_name, job.priority), [])
            insort(latest, (job.available_at, job.id))
            del latest[:-most]
            if latest[0][0] < latest[-1][0] - MARGIN_SECONDS:
                del latest[: bisect_left(latest, (latest[-1][0] - MARGIN_SECONDS, 0))]

    # ---- when to look

    @property
    def look_soon_at(self) -> float:
        """When to look, monotonic, and if that is too much by then, to do without."""
        return min(self._may_look_at, time.monotonic() + self._share * SHORTEST_IDLE_PAUSE_SECONDS)

    @property
    def look_later_at(self) -> float:
        """When to look, monotonic, after a claim has found jobs: they come first, and the next look is not too much."""
        return max(self._may_look_at, time.monotonic() + self._share * SHORTEST_IDLE_PAUSE_SECONDS)

    def may_look(self) -> bool:
        return time.monotonic() >= self._may_look_at

    def must_look(self) -> bool:
        """Whether even a child that finds all it asks for should look: a band may be new, a job have come late."""
        return time.monotonic() >= self._look_at

    # ---- what a look has shown

    def any_due(self) -> bool:
        """Whether the last look saw a job that may run."""
        clock = time.monotonic() + self._clock_offset
        return any(band.first_available_at <= clock for band in self._bands.values())

    def next_due_in(self) -> float:
        """The seconds until the next job may run that the last look saw and that could not yet, ``inf`` if none."""
        # Not "that cannot now": it may have become due since.
        firsts = (band.first_available_at for band in self._bands.values())
        first = min((first for first in firsts if first > self._last_look), default=INFINITY)
        return max(first - time.monotonic() - self._clock_offset, 0.0)

    # ---- looking

    def look(self, connection: Connection, *, everywhere: bool = False) -> None:
        """Find new bands, and the first job of each: of all its jobs if *everywhere*, else as far as is cheap."""
        began = time.monotonic()
        reach = INFINITY if everywhere else self._reach
        since = began + self._clock_offset - reach
        parts = [Part(band.queue_name, band.priority, min(since, band.floor_at)) for band in self._bands.values()]
        seen = self._sweep(connection, parts)
        now = time.monotonic()
        self._last_look = seen.clock
        self._clock_offset = seen.clock - now
        is_dear = now - began > DEAR_SECONDS
        self._learn({(band.queue_name, band.priority): band for band in seen.bands}, seen.clock, is_dear)
        if not everywhere:
            self._set_reach(now - began, now)
        self._may_look_at = now + self._share * SHORTEST_IDLE_PAUSE_SECONDS
        self._look_at = now + self._share * SHORTEST_BUSY_PAUSE_SECONDS
        took_before, self._took = self._took, now - began
        self._charge(min(self._took, took_before))  # one that is slow by itself may be anything

    @property
    def has_behind(self) -> bool:
        """Whether there is something that looks do not reach, and it is time to look at it."""
        return self._reach < INFINITY and time.monotonic() >= self._look_behind_at

    def look_behind(self, connection: Connection) -> bool:
        """
        Look at the next piece of what the looks do not reach, if there is any and it is time to.

        Whether a job was found that a claim would not have met.
        """
        began = time.monotonic()
        if not self.has_behind:
            return False
        clock = began + self._clock_offset
        until = clock - self._reach if self._behind_until is None else self._behind_until
        since = until - self._behind_width if until - self._behind_width > self._oldest else -INFINITY
        parts = [Part(band.queue_name, band.priority, since, until) for band in self._bands.values()]
        are_below = [self._lower(found) for found in self._sweep(connection, parts).bands]
        took = time.monotonic() - began
        self._behind_width *= max(min(PIECE_SECONDS / max(took, 1e-6), REACH_GROWTH), 1 / REACH_GROWTH)
        self._behind_until = None if since == -INFINITY else since
        pause = max(SHORTEST_BUSY_PAUSE_SECONDS, BUSY_PAUSES / 2 * took)
        self._look_behind_at = time.monotonic() + self._share * pause
        return any(are_below)

    def _sweep(self, connection: Connection, parts: Sequence[Part]) -> Sweep:
        return sweep_parts(connection, parts, self._queues.to_sweep, self._queues.excluded)

    def _charge(self, took: float) -> None:
        """Let the next looks wait for what this one, or the claim that followed, has cost."""
        now, dear = time.monotonic(), min(max(took - FREE_SECONDS, 0.0), DEAREST_SECONDS)
        self._may_look_at = max(self._may_look_at, now + self._share * IDLE_PAUSES * dear)
        self._look_at = max(self._look_at, now + self._share * BUSY_PAUSES * dear)

    def _set_reach(self, took: float, now: float) -> None:
        was_dear, self._was_dear = self._was_dear, took > DEAR_SECONDS
        if was_dear and self._was_dear:
            self._reach = SHORTEST_REACH_SECONDS if self._reach == INFINITY else self._reach / REACH_GROWTH
            self._reach = max(self._reach, SHORTEST_REACH_SECONDS)
            self._may_reach_further_at = now + REACH_PATIENCE_SECONDS
        elif took < CHEAP_SECONDS and self._reach < INFINITY and now > self._may_reach_further_at:
            self._reach *= REACH_GROWTH
            if now + self._clock_offset - self._reach < self._oldest:
                self._reach = INFINITY

    def _learn(self, seen: dict[tuple[str, int], Band], clock: float, is_dear: bool) -> None:
        now = time.monotonic()
        for place, found in seen.items():
            self._seen_at[place] = now
            self._lower(found)
            self._raise(place, min(found.first_available_at, clock - MARGIN_SECONDS), found.first_available_at)
        forget_after = FORGET_SECONDS if self._reach == INFINITY and not is_dear else FORGET_DEAR_SECONDS
        for place in [place for place in self._bands if place not in seen]:
            if now - self._seen_at[place] > forget_after:
                del self._bands[place], self._seen_at[place]
                self._lowered.pop(place, None)
                self._latest.pop(place, None)
            else:
                # Where others claim, only this keeps their dead entries from being walked at each claim.
                self._raise(place, clock - MARGIN_SECONDS if is_dear else -INFINITY, INFINITY)

    def _lower(self, found: Band) -> bool:
        """Let a band be known whose first job is *found*, or its floor be there; whether that is news."""
        place = (found.queue_name, found.priority)
        band = self._bands.get(place)
        first = (found.first_available_at, found.first_id)
        is_below = band is None or first < (band.floor_at, band.floor_id)
        if is_below:
            clock = time.monotonic() + self._clock_offset
            floor_at, floor_id = min(first, (clock, 0))  # a job of the future must not hide those that come before
            self._bands[place] = found._replace(floor_at=floor_at, floor_id=floor_id)
            if band is not None:
                self._lowered.setdefault(place, (band.floor_at, band.floor_id))
            self._seen_at.setdefault(place, time.monotonic())
            if floor_at > -INFINITY:
                self._oldest = min(self._oldest, floor_at)
        return is_below

    def _raise(self, place: tuple[str, int], floor_at: float, first_available_at: float) -> None:
        band = self._bands[place]._replace(first_available_at=first_available_at)
        if floor_at > band.floor_at:
            band = band._replace(floor_at=floor_at, floor_id=0)
        self._bands[place] = band
