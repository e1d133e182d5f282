"""
When a worker sleeps, and who is told that it does: the worker's side of `statements.bell`.

A worker rests while a child has a free slot and nothing for it. Then it tries the locks by which enqueues see that
someone sleeps, and once it has them it lets a child look again: what was enqueued before the locks were there is seen
by that look, and what comes later rings. Of all workers that serve the same queues one is the *leader*, who holds a
lock of their own, and only a leader heeds the bell: one job must not wake them all. The others try again every
two seconds, and at once when a leader hands over.

    rests ── tries ──┬── all locks are ours ──────────── sleeps: a ring wakes a child, which looks
                     ├── someone else sleeps already ─── a leader hears his bell as well; another waits its turn
                     └── enqueues are in flight ──────── waits for them in the lock's queue, which makes later
                                                         ones ring, and looks now and then meanwhile

A leader goes, and says so, when it is rung and no child has a free slot, or none answers. One that is rung all the
time goes as well, and looks by itself, often, for as long as that finds jobs: those who enqueue need not notify then.

Nothing here is more than a hint, and whatever goes wrong costs a poll interval. Whoever has locks listens: where
a connection is lost all are closed, and everything begins anew.
"""

import json
import random
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from zlib import crc32

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus

from ..statements import bell
from ..statements.database import execute, is_lock_conflict
from .config import Queues, WorkerConfig
from .connection import Session, WatchedConnection
from .process import ChildProcess

MAX_NAMED_QUEUES = 8  # of a worker that has a lock for each
WAIT_SECONDS = 1.0  # for enqueues in flight, at a time: whoever waits has a snapshot, which vacuum respects
ANSWER_SECONDS = 10.0  # more, for the server to say that the wait is over
TRY_AGAIN_SECONDS = 2.2
HAND_OVER_SECONDS = 0.02  # a job may end, and its slot take what has rung
NO_ANSWER_SECONDS = 0.5  # from children that should have looked
RINGS_OF_A_RUSH, RUSH_SECONDS = 50, 0.1
FIRST_LOOK_SECONDS = 0.005  # between two looks of its own, longer and longer
LONGEST_LOOK_SECONDS = 0.1
SHORTEST_RUSH_SECONDS = 0.1  # in which nothing was found, before it sleeps again
LONGEST_RUSH_SECONDS = 3.2
REST_SECONDS = 1.0  # after so much sleep a rush is a new one

INFINITY = float("inf")


class Doorbell:
    """
    For the listener's thread, but for `more_jobs` and `retire`.

    *children* returns those that live; *wake* has one claim, *look* one look.
    """

    def __init__(
        self,
        config: WorkerConfig,
        children: Callable[[], list[ChildProcess]],
        wake: Callable[[], None],
        look: Callable[[], None],
        waiter: Session,
    ) -> None:
        self.is_retired = config.burst or config.notify == "never"  # it sleeps no more
        self.leads = False
        self._queues = config.queues
        self._children = children
        self._wake = wake
        self._look = look
        self._waiter = waiter
        self._lead_key = _lead_key(config.queues)
        self._session: WatchedConnection | None = None
        self._second: WatchedConnection | None = None  # that waits for locks, and holds those it got
        self._lost_sessions: list[tuple[int, datetime]] = []  # as soon as another begins
        self._has_more_jobs = False
        self._has_to_go = False
        self._forget()

    def _forget(self) -> None:
        """Nothing is ours, and nothing known."""
        self.leads = False
        self._keys: list[int] = []  # of all the locks that it needs
        self._held: set[int] = set()
        self._waits_for: int | None = None
        self._wait_until = 0.0  # from here on all moments are monotonic
        self._try_at = 0.0
        self._rung_since: float | None = None  # the oldest ring that no look has answered
        self._rung_at = 0.0  # and the youngest
        self._rings: deque[float] = deque(maxlen=RINGS_OF_A_RUSH)
        self._is_in_a_rush = False
        self._rush_began = self._slept_since = 0.0
        self._rush_patience = SHORTEST_RUSH_SECONDS
        self._look_at = self._looked_at = 0.0
        self._look_pause = FIRST_LOOK_SECONDS

    # ---- what happens

    def open(self, session: WatchedConnection) -> None:
        """*session* listens from now on."""
        self._forget()
        self._session = session
        # The server may not have noticed that our last sessions are lost: their locks would keep us from ours.
        while self._lost_sessions:
            bell.end_session(session, self._lost_sessions[-1])
            self._lost_sessions.pop()
        self._lost_sessions.append(bell.prepare(session))
        names = self._queues.to_sweep
        named = names is not None and len(names) <= MAX_NAMED_QUEUES
        self._keys = bell.keys_of(session, names or []) if named else [bell.ANY_KEY]

    def close(self) -> None:
        """A connection is lost, or the worker ends: all locks are gone with the sessions."""
        self._forget()
        self._session = None
        self._hang_up()

    def rang(self, times: int = 1) -> None:
        """Notifications came, so many at once, for queues that the worker serves."""
        if self.leads:
            self._rings.extend([time.monotonic()] * times)
            self._owe(time.monotonic())
        if self.leads or self.is_retired:
            self._wake()

    def handed_over(self) -> None:
        """Some leader let its locks go."""
        self._try_at = 0.0

    def more_jobs(self) -> None:
        """A child has found more than it can take. From any thread."""
        self._has_more_jobs = True

    def retire(self) -> None:
        """Let go of everything, for good: the worker claims no more. From any thread."""
        self._has_to_go = True

    @property
    def waits_at(self) -> list[int]:
        """The descriptor of the second connection while there is one: readable when a wait is over, or it is lost."""
        return [self._second.fileno()] if self._second is not None else []

    def check(self) -> None:
        """Raise unless the second connection, if there is one, still answers: a silent one may be dead."""
        if self._second is not None and self._waits_for is None:
            self._second.execute("SELECT 1")

    # ---- what is to be done

    def turn(self) -> float:
        """Do what there is to do now, and return the seconds until the next turn unless something happens."""
        self._hear_waiter()
        now = time.monotonic()
        if self._has_more_jobs:
            self._has_more_jobs = False
            if self.leads:
                self._owe(now)
        vitals = [child.vitals() for child in self._children() if not child.was_told_to_stop]
        resting = [vital for vital in vitals if vital.rested]
        found = max((vital.found for vital in vitals), default=0.0)
        self._note_answer(max((vital.worked for vital in resting), default=0.0))
        if self._has_to_go:
            self.is_retired = True
        if self.leads:
            self._go_if_need_be(now, rests=bool(resting))
        if self.is_retired or not resting:
            return self._pause(now, INFINITY)
        if self._is_in_a_rush and now - max(found, self._rush_began) > self._rush_patience:
            self._is_in_a_rush = False
        if not self._is_in_a_rush and self._lacks_locks and self._waits_for is None and now >= self._try_at:
            self._fall_asleep(now)
        if (self._is_in_a_rush or self._waits_for is not None) and now >= self._look_at:
            if found >= self._looked_at:
                self._look_pause = FIRST_LOOK_SECONDS
            self._look_by_itself(now)
        tries = self._lacks_locks and not self._is_in_a_rush and self._waits_for is None
        return self._pause(now, self._try_at if tries else INFINITY)

    @property
    def _lacks_locks(self) -> bool:
        return not self.leads or len(self._held) < len(self._keys)

    def _owe(self, now: float) -> None:
        """Someone must look after the moment *now*."""
        self._rung_at = now
        if self._rung_since is None:
            self._rung_since = now

    def _note_answer(self, worked: float) -> None:
        """A child that has a free slot still has heeded what was before the moment *worked*."""
        if self._rung_since is not None and worked >= self._rung_since:
            self._rung_since = None if worked >= self._rung_at else worked

    def _go_if_need_be(self, now: float, *, rests: bool) -> None:
        patience = NO_ANSWER_SECONDS if rests else HAND_OVER_SECONDS
        if self.is_retired:
            self._let_go(hand_over=True)
        elif self._rung_since is not None and now - self._rung_since >= patience:
            self._let_go(hand_over=True)
            if rests:  # as it seems; whoever it is does not answer
                self._try_at = now + TRY_AGAIN_SECONDS
        elif len(self._rings) == RINGS_OF_A_RUSH and now - self._rings[0] < RUSH_SECONDS:
            self._let_go(hand_over=False)
            is_old = now - self._slept_since < REST_SECONDS
            longer = min(self._rush_patience * 2, LONGEST_RUSH_SECONDS)
            self._rush_patience = longer if is_old else SHORTEST_RUSH_SECONDS
            self._is_in_a_rush = True
            self._rush_began = self._look_at = now
            self._look_pause = FIRST_LOOK_SECONDS

    def _let_go(self, *, hand_over: bool) -> None:
        assert self._session is not None
        if self._second is not None:
            if self._waits_for is not None:  # a place in the queue, too, looks to others as if someone slept
                self._second.cancel_safe(timeout=ANSWER_SECONDS)
                self._end_wait()
            bell.let_go(self._second, hand_over=False)
        bell.let_go(self._session, hand_over=hand_over)
        self.leads = False
        self._held.clear()
        self._rung_since = None
        self._rings.clear()
        self._try_at = 0.0

    def _fall_asleep(self, now: float) -> None:
        assert self._session is not None
        had = len(self._held) + self.leads
        missing = [key for key in self._keys if key not in self._held]
        tried = bell.try_locks(self._session, self.leads, self._lead_key, missing)
        self.leads = tried.leads
        self._held |= tried.ours
        self._try_at = now + TRY_AGAIN_SECONDS * random.uniform(0.9, 1.1)
        if len(self._held) + self.leads > had:
            self._slept_since = now
            self._look_once_more()
        if tried.in_flight:
            self._wait_for(tried.in_flight[0])

    def _look_once_more(self) -> None:
        """What was enqueued before the locks were ours has not rung."""
        self._owe(time.monotonic())
        self._look()

    def _look_by_itself(self, now: float) -> None:
        self._look()
        self._looked_at = now
        self._look_at = now + self._look_pause
        longest = LONGEST_LOOK_SECONDS if self._is_in_a_rush else WAIT_SECONDS
        self._look_pause = min(self._look_pause * 2, longest)

    def _pause(self, now: float, at: float) -> float:
        moments = [at]
        if self._waits_for is not None:
            moments.append(self._wait_until)
        if self._is_in_a_rush or self._waits_for is not None:
            moments.append(self._look_at)
        if self._rung_since is not None:
            moments += [self._rung_since + patience for patience in (HAND_OVER_SECONDS, NO_ANSWER_SECONDS)]
        return max(min(moment for moment in moments if moment > now or moment == at) - now, 0.0)

    # ---- waiting for enqueues in flight

    def _wait_for(self, key: int) -> None:
        """Ask for the lock at *key*, and go on: the answer is for `_hear_waiter`."""
        if self._second is None:
            self._second = self._waiter.connection
            self._lost_sessions.append(bell.prepare(self._second))
            execute(self._second, f"SET lock_timeout = '{WAIT_SECONDS:g}s'")
        self._second.pgconn.send_query(bell.WAIT_SQL.format(key=key).encode())
        self._second.pgconn.flush()
        self._waits_for = key
        self._wait_until = time.monotonic() + WAIT_SECONDS + ANSWER_SECONDS
        self._look_at = time.monotonic()
        self._look_pause = FIRST_LOOK_SECONDS

    def _hear_waiter(self) -> None:
        if self._second is None:
            return
        pgconn = self._second.pgconn
        pgconn.consume_input()  # raises if the connection is lost
        key = self._waits_for
        if key is None:
            return
        if pgconn.is_busy():
            if time.monotonic() > self._wait_until:
                raise psycopg.OperationalError("no answer to the wait for a lock")
        elif self._end_wait():
            self._held.add(key)
            self._slept_since = time.monotonic()
            self._look_once_more()

    def _end_wait(self) -> bool:
        """Take the answer; whether the lock is ours."""
        assert self._second is not None
        with self._second.waiting():
            is_granted = _is_granted(self._second)
        self._waits_for = None
        self._try_at = 0.0
        return is_granted

    def _hang_up(self) -> None:
        """Give the second connection up, with its locks."""
        self._second = None
        self._waits_for = None
        self._waiter.close()


def _is_granted(connection: WatchedConnection) -> bool:
    """Whether the lock that was waited for is ours; raises what is not about the lock."""
    granted = False
    while (result := connection.pgconn.get_result()) is not None:
        if result.status == ExecStatus.TUPLES_OK:
            granted = True
        else:
            state = result.error_field(DiagnosticField.SQLSTATE) or b""
            error = psycopg.errors.lookup(state.decode()) if state else psycopg.OperationalError
            failure = error(result.get_error_message())
            if not is_lock_conflict(failure):
                raise failure
    return granted


def _lead_key(queues: Queues) -> int:
    """The place of the lock of those who serve the same queues."""
    served = [
        sorted(queues.to_sweep or []),
        queues.to_sweep is None,
        sorted(queues.excluded) if not queues.named else [],
    ]
    return bell.FIRST_LEAD_KEY + crc32(json.dumps(served).encode()) % 2_000_000_000
