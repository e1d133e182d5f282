"""
A worker's child: it claims jobs, hands them to slots, and settles what they come to.

One control loop, in the main thread, does all of it in *rounds*: settle what has arrived, then claim the
next batch, one commit. There is no timer for batches. When idle a job is settled at once; when busy, what
arrives during a round makes the next batch.

It is told what to do by its supervisor's words, lines of JSON: stop, lost. Their end is the supervisor's death. That
there are jobs it hears through its `Alarm`. How the process begins and ends is in `entry`.

What the loop decides by belongs to it alone. Other threads put things in queues or raise a flag, and wake it.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import TextIO

import psycopg

from ..compat import task_backends
from ..conf import Options
from ..exceptions import ClaimLost, Interrupted, Interruption, TaskCancelled
from ..outcomes import Claim, Outcome, Released, Retried, Snoozed, Succeeded
from ..statements import claim as claiming
from ..statements.settle import Settlement
from . import attempt
from .alarm import LOOK, MORE, WAKE, Alarm
from .announcer import Announcer, Ending
from .claimer import Claimer
from .config import WorkerConfig
from .connection import Session
from .held import HeldJob, log_lost
from .holdings import Holdings
from .interrupter import Interrupter, courtesy
from .memory import Scales
from .naming import OwnerNames
from .pacing import Pacing
from .rounds import Round, Rounds
from .settler import Settler
from .slots import Slots
from .voice import Voice
from .watchdog import Watchdog

logger = logging.getLogger("django_pgqueue")

GATHER_SECONDS = 0.005  # that endings wait for others, while there is more to run: a round costs what it costs
STALE_BUFFER_SECONDS = 0.2  # a buffered job that found no slot in this time goes back
CATCH_UP_SECONDS = 0.1  # between two looks at whether the announcer has caught up
LARGE_ROUND = 200  # jobs; it takes so long that what the last one came to can be done meanwhile
LONGEST_SLEEP_SECONDS = 10.0  # the supervisor wants to see that the loop turns
LAST_WORDS_SECONDS = 2.0  # after the grace period, for interrupted tasks to end and be written
EXIT_RECYCLE = 10  # the exit code of a child that has run its number of jobs, or has grown too large


class Child:
    """The control loop. *owner* is the beginning of the names that it claims under."""

    def __init__(
        self,
        config: WorkerConfig,
        owner: str,
        application_name: str,
        holdings: Holdings,
        words: TextIO,
        voice: int | None = None,
        bell: int | None = None,
    ) -> None:
        options = Options.parse(config.backend, task_backends[config.backend].options)
        self._config = config
        self._names = OwnerNames(owner, config.lease)
        self._holdings = holdings
        self._words = words
        self._session = Session(config.database, application_name)
        self._watchdog = Watchdog([self._session], each_turn=self._breathe)
        self._slots = Slots(
            *(config.concurrency, holdings, options.backoff, config.database),
            on_finish=self._note_finished,
            on_limit=lambda: self._interrupter.wake(),
        )
        self._interrupter = Interrupter(self._slots.running)
        self._has_interrupted = False
        self._pacing = Pacing(config.concurrency)
        self._announcer = Announcer()
        self._alarm = Alarm(bell)
        self._is_asleep = False
        self._gathers = False  # it lets endings gather while it sleeps
        self._held: dict[Claim, HeldJob] = {}
        self._last_round: Round | None = None  # until it is followed up: in full swing, beside the next one
        self._settler = Settler(self._session)
        self._claimer = Claimer(config)
        self._rounds = Rounds(self._session, self._settler, self._claimer, self._names)
        self._retry_at = 0.0  # when to touch the database again after a failure
        self._buffered_since: float | None = None
        self._stop_by: float | None = None  # the end of the grace period, once stopping
        self._said_lost: SimpleQueue[tuple[Claim, type[Interruption]]] = SimpleQueue()  # by the supervisor
        self._voice = Voice(voice, holdings)
        self._jobs_left = float("inf") if config.max_jobs is None else config.max_jobs
        self._scales = Scales(config.max_memory)
        self._has_run_any = False  # before that, another child would be as large

    def run(self) -> int:
        """Work until told to stop, or in burst mode until nothing is left; return the exit code."""
        self._breathe()
        self._watchdog.start()
        self._slots.start()
        self._interrupter.start()
        self._announcer.start()
        threading.Thread(target=self._listen_to_supervisor, name="pgqueue-supervisor-pipe", daemon=True).start()
        while True:
            pause = self._turn()
            self._holdings.note(looped=time.monotonic())
            self._speak()
            self._mind_memory()
            if self._is_finished():
                break
            self._sleep(pause)
        self._follow_up()
        self._interrupter.stop()
        if not self._held:  # otherwise a task has outlasted the grace period
            self._slots.stop()
        self._announcer.finish()
        while not self._announcer.has_ended(patience=1.0):
            self._holdings.note(looped=time.monotonic())  # what it waits for are receivers
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                logger.warning("A receiver of task_finished has outlasted the grace period.")
                break
        self._session.close()
        self._watchdog.stop()
        return EXIT_RECYCLE if self._jobs_left <= 0 and self._stop_by is None else 0

    def stop(self, grace: float) -> None:
        """Claim no more, give back what has not started, and be gone in *grace* seconds. From any thread."""
        by = time.monotonic() + grace
        self._stop_by = by if self._stop_by is None else min(self._stop_by, by)
        self._alarm.ring()

    def wake(self) -> None:
        """Claim now: there may be jobs. From any thread."""
        self._claimer.wake()
        self._alarm.ring()

    def _note_finished(self) -> None:
        # Otherwise it looks before it sleeps.
        if self._is_asleep or (self._gathers and not self._slots.has_waiting):
            self._alarm.ring()

    def _sleep(self, seconds: float) -> None:
        self._is_asleep = not self._gathers
        heard = self._alarm.sleep(seconds if self._gathers or not self._slots.finished else 0.0)
        self._is_asleep = self._gathers = False
        if WAKE in heard:
            self._claimer.wake()
        if MORE in heard or LOOK in heard:
            self._claimer.ask(is_poll=MORE not in heard)

    # ---- one turn of the loop

    def _turn(self) -> float:
        """Do what there is to do and return how long to sleep, in seconds, unless woken."""
        if not self._said_lost.empty():
            self._follow_up()  # what it has settled is not lost
        self._collect_finished()
        self._mark_lost()
        self._give_back_unstarted()
        now = time.monotonic()
        if now < self._retry_at:
            return self._sleep_seconds()
        wanted = self._wanted(now)
        if self._settler.ready and self._claimer.can_peek() and not self._claimer.has_to_peek:
            wanted = 0  # it need not hurry to look, and what has ended is one statement by itself
        if self._last_round is not None and not (wanted and self._rounds.begins_with_settling):
            self._follow_up()  # not beside the next round: until its first statement is sent it might take long
            return 0.0
        if not wanted and self._can_gather():
            self._gathers = True
            return max(self._settler.since + GATHER_SECONDS - now, 0.0)
        if now < self._settler.next_at and not wanted and not self._names.has_old:
            self._holdings.note(worked=now)  # there was nothing to do, which is not a failure
            return self._sleep_seconds()
        try:
            self._accept(self._settler.try_busy())
            done = self._rounds.do(wanted, self._held, meanwhile=self._follow_up)
        except psycopg.Error as error:
            self._follow_up()
            self._retry_at = time.monotonic() + self._rounds.recover_from(error)
            return 0.0
        self._holdings.note(worked=time.monotonic())
        self._follow_up()  # the one before, if there was no time for it
        self._last_round = done
        if done.claimed:
            self._pacing.claimed(len(done.claimed), sum(len(job.args) + len(job.kwargs) for job in done.claimed))
        if self._is_in_full_swing(done):
            return 0.0
        self._follow_up()
        return self._sleep_seconds()

    def _is_in_full_swing(self, done: Round) -> bool:
        """Whether it seems that another large round will follow the one that is *done* at once."""
        is_large = len(done.settlement.settled) + len(done.claimed) >= LARGE_ROUND
        return is_large and done.wanted > 0 and len(self._slots.finished) >= LARGE_ROUND

    def _follow_up(self) -> None:
        """Let go of what the last round has settled, and hand over what it has claimed, unless that has been done."""
        if self._last_round is None:
            return
        done, self._last_round = self._last_round, None
        self._accept(done.settlement)
        self._hand_over(done)
        if done.wanted:
            # Not before they are published: this child would still look idle, and be the one that is woken.
            self._voice.note_claim(was_filled=len(done.claimed) == done.wanted)

    def _can_gather(self) -> bool:
        """Whether what is ready can wait a moment for more: the slots have enough to do, and nobody waits for it."""
        in_hand = len(self._held) - len(self._settler)
        return (
            in_hand > self._config.concurrency
            and self._settler.ready > 0
            and time.monotonic() - self._settler.since < GATHER_SECONDS
            and self._stop_by is None
            and not self._names.has_old
        )

    def _wanted(self, now: float) -> int:
        if self._announcer.is_far_behind:
            self._claimer.not_before(now + CATCH_UP_SECONDS)
        if not self._claimer.is_due(now) or self._stop_by is not None:
            return 0
        return self._room()

    def _room(self) -> int:
        """How many jobs could be claimed. What has ended makes room already: a round settles it before it claims."""
        held = self._held_count
        in_hand = held - len(self._settler)
        places = Pacing.capacity(self._config.concurrency) - held
        return int(max(min(self._pacing.wanted(in_hand), self._jobs_left - in_hand, places), 0))

    @property
    def _held_count(self) -> int:
        """How many jobs are held, once the last round is followed up."""
        done = self._last_round
        changes = 0 if done is None else len(done.claimed) - len(done.settlement.settled) - len(done.settlement.lost)
        return len(self._held) + changes

    # ---- what arrives from slots

    def _collect_finished(self) -> None:
        while self._slots.finished:
            held = self._slots.finished.popleft()
            assert held.attempted is not None
            self._pacing.finished(held.attempted.seconds)
            self._jobs_left -= 1
            self._buffered_since = time.monotonic()
            self._has_run_any = True
            if held.attempted.is_settled:
                self._end([held.attempted.outcome])
                self._expect_more()
            elif held.is_lost:
                self._forget(held.claim)
                self._expect_more()
            else:
                self._settler.add([held.attempted.outcome])

    def _mark_lost(self) -> None:
        """Have the tasks ended whose claim the supervisor found lost; one that has just been settled is not held."""
        while not self._said_lost.empty():
            claim, reason = self._said_lost.get()
            held = self._held.get(claim)
            if held is not None and held.attempted is None and not held.is_settling:
                if not held.is_lost:
                    held.lost_for = reason
                    held.deadline = min(held.deadline, time.monotonic() + courtesy(held))
                    self._holdings.limit(held.place, held.deadline)  # here, where places are given out
                    log_lost(claim, reason)
                self._interrupter.wake()

    def _give_back_unstarted(self) -> None:
        """Release buffered jobs when stopping, or when none of them has found a slot for a while."""
        if self._buffered_since is None:
            return
        stale = time.monotonic() - self._buffered_since > STALE_BUFFER_SECONDS
        is_buffering = len(self._held) > self._config.concurrency
        if self._stop_by is None and not (stale and is_buffering):
            return
        unstarted = self._slots.take_back()
        self._settler.add(Released(held.claim) for held in unstarted if not held.is_lost)
        for held in unstarted:
            if held.is_lost:
                self._forget(held.claim)
        if unstarted and self._stop_by is None:
            self._pacing.stalled()
        self._buffered_since = None

    def _hand_over(self, done: Round) -> None:
        if not done.claimed:
            return
        # It was told to stop meanwhile, or all that has taken so long that others may have the jobs.
        if self._stop_by is not None or time.monotonic() > done.lease_ends:
            self._settler.add(Released(job.claim) for job in done.claimed)
            return
        self._slots.give([self._hold(job, done.earlier.get(job.id, ()), done.lease_ends) for job in done.claimed])
        self._buffered_since = time.monotonic()

    def _hold(self, job: claiming.ClaimedJob, earlier: Sequence[claiming.EarlierAttempt], lease_ends: float) -> HeldJob:
        claim = job.claim
        self._held[claim] = held = HeldJob(job, claim, earlier, self._holdings.add(claim), lease_ends)
        return held

    # ---- what the database answers

    def _accept(self, settlement: Settlement) -> None:
        for refused, error in settlement.refused:
            reason = " ".join(str(error).split())
            logger.error("The database refused how job %s ended: %s", refused.claim.job_id, reason)
        if settlement.settled or settlement.lost:
            self._expect_more()
        self._end(settlement.settled)
        for lost in settlement.lost:
            self._forget(lost.claim)
            if not isinstance(lost, Released) or lost.started:
                log_lost(lost.claim, ClaimLost)

    def _expect_more(self) -> None:
        """A job has ended, and may have enqueued others."""
        self._claimer.expect_jobs(0.0 if self._config.burst else float("inf"))

    def _end(self, outcomes: Sequence[Outcome]) -> None:
        """Claims have ended, as is written and committed."""
        are_heard = attempt.are_successes_heard()
        endings: list[Ending] = []
        for written in outcomes:
            held = self._forget(written.claim)
            if isinstance(written, Succeeded) and not are_heard:
                continue
            if held is not None and held.attempted is not None:
                endings.append((held.attempted, written))
            if isinstance(written, (Retried, Snoozed)):
                self._claimer.expect_jobs(time.monotonic() + written.delay_seconds)
        if endings:
            self._announcer.announce(endings)

    def _forget(self, claim: Claim) -> HeldJob | None:
        held = self._held.pop(claim, None)
        if held is not None:
            self._holdings.remove(held.place)
        return held

    # ---- signs of life

    def _breathe(self) -> None:
        """In the watchdog's thread."""
        now = time.monotonic()
        self._holdings.note(breathed=now)
        if self._session.is_waiting:
            self._holdings.note(looped=now)  # the loop waits, and the watchdog sees to it that it will not for long

    def _speak(self) -> None:
        """Let the supervisor know what it should."""
        takes_jobs = self._stop_by is None and self._jobs_left > self._held_count
        self._voice.tell_rest(self._claimer.rests_since if takes_jobs else 0.0, self._claimer.found_at)
        self._voice.speak()

    def _mind_memory(self) -> None:
        if self._has_run_any and self._jobs_left > 0 and self._scales.show_too_much():
            self._jobs_left = 0  # so that another takes this one's place

    # ---- sleeping and ending

    def _sleep_seconds(self) -> float:
        now = time.monotonic()
        moments = [now + LONGEST_SLEEP_SECONDS]
        if self._slots.finished:
            moments.append(max(now, self._retry_at))
        moments.append(max(self._settler.next_at, self._retry_at))
        moments.append(self._voice.next_at)
        if self._buffered_since is not None and len(self._held) > self._config.concurrency:
            moments.append(self._buffered_since + STALE_BUFFER_SECONDS)
        if self._stop_by is not None:
            moments.append(self._stop_by)
        elif self._room():
            moments.append(max(self._claimer.at, self._retry_at))
        if self._names.has_old:
            moments.append(now + 1.0)
        return max(min(moments) - now, 0.0)

    def _is_finished(self) -> bool:
        if self._stop_by is not None:
            if self._settler:
                return self._has_outlasted_grace()
            # Nothing but the end of this process ends a task that has ignored its deadline.
            overdue_at = time.monotonic() - self._config.grace
            return all(held.deadline < overdue_at for held in self._held.values()) or self._has_outlasted_grace()
        is_done = self._jobs_left <= 0 or (self._config.burst and self._claimer.is_drained)
        return is_done and not self._held and not self._settler

    def _has_outlasted_grace(self) -> bool:
        """Whether the time is up: first, interrupt what still runs; what cannot be is left to the supervisor."""
        assert self._stop_by is not None
        if time.monotonic() < self._stop_by:
            return False
        if self._has_interrupted:
            return True
        logger.info("The grace period is over with %d jobs unfinished.", len(self._held))
        self._has_interrupted = True
        self._interrupter.interrupt_all(Interrupted)
        self._stop_by = time.monotonic() + LAST_WORDS_SECONDS
        return False

    # ---- the supervisor's words, and the child's

    def _listen_to_supervisor(self) -> None:
        for line in self._words:
            word = json.loads(line)
            match word["word"]:
                case "stop":
                    self.stop(word["grace"])
                    logger.debug("Told to stop within %g s.", word["grace"])
                case "lost" | "cancelled" as kind:
                    for claim in word["claims"]:
                        self._said_lost.put((Claim(*claim), TaskCancelled if kind == "cancelled" else ClaimLost))
                    self._alarm.ring()
        # Its end: the supervisor is dead, and so are renewals. Be gone before the leases are.
        logger.warning("The supervisor is gone; stopping.")
        self.stop(min(self._config.grace, self._config.lease / 3))
