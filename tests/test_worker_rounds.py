"""The turns of a child's control loop, one by one, in this process; no slot runs anything unless a test starts it."""

import io
import logging
import threading
import time

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from django_pgqueue.exceptions import ClaimLost
from django_pgqueue.models import Job
from django_pgqueue.outcomes import Claim, Succeeded
from django_pgqueue.statements import claim as claiming
from django_pgqueue.statements.database import execute
from django_pgqueue.statements.settle import Settlement
from django_pgqueue.worker import announcer
from django_pgqueue.worker import child as child_module
from django_pgqueue.worker import upkeep as upkeep_module
from django_pgqueue.worker.attempt import Attempted
from django_pgqueue.worker.child import Child
from django_pgqueue.worker.connection import Session
from django_pgqueue.worker.holdings import Holdings
from django_pgqueue.worker.pacing import MAX_BUFFERED, Pacing
from django_pgqueue.worker.rounds import Round
from django_pgqueue.worker.upkeep import Death, Duty, Upkeep, _newest
from django_pgqueue.worker.voice import MORE_JOBS

from .helpers import (
    InThread,
    actor,
    claim_one,
    enqueue,
    enqueue_jobs,
    expire_lease,
    here,
    row,
    sql,
    wait_until,
    worker_config,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def make_child():
    made = []

    def make(**changes):
        holdings = Holdings.create(Pacing.capacity(4))
        child = Child(worker_config(**changes), "test", "test child", holdings, io.StringIO())
        made.append((child, holdings))
        return child

    yield make
    for child, holdings in made:
        child._session.close()
        holdings.close()


def finish(child, held):
    """Let *held* have succeeded, as a slot would say it."""
    held.attempted = Attempted(held.job, Succeeded(held.claim), None, None, 0.0)
    child._slots.finished.append(held)


def _refuse_for_a_lock(*args):
    raise psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")


def turn_until(child, condition):
    """Let the loop turn as often as it wants to: looks for new bands have pauses, of milliseconds."""

    def turned():
        child._turn()
        return condition()

    wait_until(turned, "the child's turns")


def test_a_wake_up_in_the_middle_of_a_round_is_not_lost(make_child, monkeypatch):
    """R31: the round has not seen the job, and would sleep until the next poll, in ten minutes."""
    child = make_child()
    is_first = [True]

    def enqueue_after_the_look():
        if is_first.pop() if is_first else False:
            enqueue()
            child.wake()
        return float("inf")

    monkeypatch.setattr(child._claimer._floors, "next_due_in", enqueue_after_the_look)

    child._turn()
    assert not child._held

    turn_until(child, lambda: len(child._held) == 1)


def test_what_has_ended_is_written_before_the_child_looks_for_more(make_child):
    """R31: nobody has said that there is more, and an ending by itself is one statement."""
    child = make_child(concurrency=1)
    job_id = enqueue()
    turn_until(child, lambda: child._held)
    finish(child, *child._held.values())
    wait_until(child._claimer.can_peek, "the next look")

    child._turn()

    assert row(job_id, "status") == ("done",)
    assert child._claimer.can_peek()
    turn_until(child, lambda: not child._claimer.can_peek() and child._claimer.rests_since)


def test_a_child_holds_what_it_has_published_and_never_more_than_fits(make_child):
    child = make_child()
    for _ in range(500):
        child._pacing.finished(0.0)  # the largest buffer there is
    enqueue_jobs(2 * MAX_BUFFERED)

    for _ in range(4):
        child._turn()
        assert {held.claim for held in child._holdings.read()} == set(child._held)

    assert len(child._held) == 4 + MAX_BUFFERED


def test_what_cannot_be_settled_takes_the_place_of_other_jobs_in_the_end(make_child):
    """R18: someone who locks running rows for an hour must not make a child hold more than it can publish."""
    child = make_child()
    for _ in range(500):
        child._pacing.finished(0.0)
    enqueue_jobs(3 * MAX_BUFFERED)
    with actor() as other:
        sql(other, "BEGIN")
        for _ in range(5):
            child._turn()
            for held in list(child._held.values()):
                if held.attempted is None:
                    finish(child, held)
            child._slots.take_back()
            sql(other, "SELECT 1 FROM django_pgqueue_job WHERE status = 'running' FOR UPDATE")
            child._retry_at = 0.0

        assert len(child._held) == Pacing.capacity(4)
        sql(other, "ROLLBACK")

    turn_until(child, lambda: Job.objects.filter(status="done").count() == Pacing.capacity(4))


class TestFullSwing:
    """Large rounds that follow each other: what one came to is done while the server works on the next."""

    @pytest.fixture
    def child(self, make_child, monkeypatch):
        """One that has just settled five jobs and claimed five, of ten that it holds; two more have ended since."""
        child = make_child(concurrency=4)
        monkeypatch.setattr(child_module, "LARGE_ROUND", 2)
        monkeypatch.setattr(child_module, "STALE_BUFFER_SECONDS", 1e9)
        monkeypatch.setattr(child._pacing, "wanted", lambda in_hand: max(10 - in_hand, 0))
        enqueue_jobs(100)
        turn_until(child, lambda: len(child._held) == 10)
        self.finish_some(child, 5)
        child.wake()  # it need not look first
        in_time = child._rounds.do

        def do(*parameters, **others):
            done = in_time(*parameters, **others)
            self.finish_some(child, 2)
            return done

        with monkeypatch.context() as patch:
            patch.setattr(child._rounds, "do", do)
            assert child._turn() == 0.0
        return child

    def finish_some(self, child, count):
        for _ in range(count):
            finish(child, child._slots._line.take_if(lambda held: True))

    def counts(self):
        return [Job.objects.filter(status=status).count() for status in ("pending", "running", "done")]

    def test_what_a_round_came_to_is_done_beside_the_next(self, child, monkeypatch):
        assert self.counts() == [85, 10, 5]
        assert len(child._held) == 10, "what is settled is still held, and what is claimed not yet"
        moments = []
        hand_over = child._hand_over

        def note(done):
            is_beside = child._session.connection.pgconn.transaction_status == TransactionStatus.ACTIVE
            moments.append((len(done.claimed), is_beside))
            hand_over(done)

        monkeypatch.setattr(child, "_hand_over", note)
        child.wake()

        child._turn()

        assert moments == [(5, True), (2, False)]
        assert self.counts() == [83, 10, 7]
        assert {held.claim for held in child._holdings.read()} == set(child._held)
        assert len(child._held) == 10

    def test_it_is_done_also_when_there_is_no_next(self, child):
        child._slots.finished.clear()

        assert child._turn() == 0.0

        assert len(child._held) == 10
        assert all(row(claim.job_id, "status", "claim_version") == ("running", 1) for claim in child._held)

    @pytest.mark.parametrize("first", ["a release", "a busy row", "a look", "a stop", "a lost claim"])
    def test_it_is_done_before_anything_that_might_take_long(self, child, monkeypatch, first):
        """R18, R20: nobody renews claims that are not published, and a claim under an old name might go back."""
        match first:
            case "a release":
                child._names._old = {"test/0": time.monotonic() + 60}
            case "a busy row":
                child._settler._busy.append(Succeeded(Claim(1, 1)))
            case "a look":
                child._claimer._owes_look = True
                child._claimer._floors._look_at = 0.0
            case "a stop":
                child.stop(10.0)
            case "a lost claim":
                child._said_lost.put((Claim(1, 1), ClaimLost))
        open_rounds = []
        do = child._rounds.do

        def note(*parameters, **others):
            open_rounds.append(child._last_round)
            return do(*parameters, **others)

        monkeypatch.setattr(child._rounds, "do", note)
        child.wake()

        child._turn()

        assert child._last_round is None
        assert open_rounds in ([], [None])

    def test_claims_whose_lease_may_have_ended_meanwhile_go_back(self, child):
        """R20: another worker may have recovered them."""
        claimed = [job.id for job in child._last_round.claimed]
        child._last_round = child._last_round._replace(lease_ends=time.monotonic() - 1)

        turn_until(child, lambda: row(claimed[0], "claim_version")[0] > 1)

        assert child._claimer.lease_ends > time.monotonic()
        held = {claim.job_id: claim.version for claim in child._held}
        assert {row(job_id, "status", "claim_version") for job_id in claimed if job_id not in held} <= {("pending", 2)}
        assert all(held.get(job_id, 3) == 3 for job_id in claimed)

    def test_it_is_done_before_an_ending_that_is_refused_is_looked_for(self, child, monkeypatch):
        """R18: that takes a transaction for each half."""
        ended = list(child._slots.finished)
        for held in ended:
            held.attempted = held.attempted._replace(outcome=Succeeded(held.claim, '"\ud800"'))
        open_rounds = []
        write_carefully = child._settler.write_carefully

        def note():
            open_rounds.append(child._last_round)
            return write_carefully()

        monkeypatch.setattr(child._settler, "write_carefully", note)
        child.wake()

        child._turn()

        assert open_rounds == [None]
        assert {row(held.claim.job_id, "status") for held in ended} == {("failed",)}

    def test_it_is_done_also_when_the_next_fails(self, child):
        """R20: or else jobs that are claimed would run after their lease only."""
        here("SELECT pg_terminate_backend(%s)", [child._session.connection.info.backend_pid])
        child.wake()

        child._turn()

        assert {held.claim for held in child._holdings.read()} == set(child._held)
        assert self.counts() == [85, 10, 5]
        assert set(Job.objects.filter(status="running").values_list("id", "claim_version")) == set(child._held)
        child._retry_at = 0.0
        turn_until(child, lambda: self.counts() == [83, 10, 7])
        assert not Job.objects.filter(claim_version__gt=1).exists()

    def test_it_is_done_once_when_the_next_is_refused_a_row(self, child):
        """R18: someone holds a row that has ended, and the claim waits for a later turn."""
        ended = child._slots.finished[0].claim.job_id
        with actor() as other:
            sql(other, "BEGIN")
            sql(other, "SELECT 1 FROM django_pgqueue_job WHERE id = %s FOR UPDATE", [ended])
            child.wake()
            child._turn()
            assert self.counts() == [85, 9, 6]
            assert len(child._held) == 9
            sql(other, "ROLLBACK")

        turn_until(child, lambda: self.counts()[2] == 7)
        assert not Job.objects.filter(claim_version__gt=1).exists()

    def test_jobs_that_were_claimed_go_back_when_the_child_is_told_to_stop(self, child):
        child.stop(10.0)

        turn_until(child, lambda: self.counts() == [93, 0, 7])

        assert set(Job.objects.filter(status="pending").values_list("attempts", flat=True)) == {0}

    def test_a_claim_that_is_lost_in_between_is_no_longer_held(self, child):
        claimed = child._last_round.claimed[0]
        here("UPDATE django_pgqueue_job SET claim_version = 7 WHERE id = %s", [claimed.id])
        child._turn()
        finish(child, child._held[claimed.claim])

        turn_until(child, lambda: claimed.claim not in child._held)

        assert row(claimed.id, "status", "claim_version") == ("running", 7)


def test_an_ending_whose_row_someone_holds_keeps_no_other_job_from_being_claimed(make_child):
    """R18, R19: a person may hold it for an hour."""
    child = make_child()
    held_row = enqueue()
    turn_until(child, lambda: child._held)
    finish(child, *child._held.values())
    child._slots.take_back()
    with actor() as other:
        sql(other, "BEGIN")
        sql(other, "SELECT 1 FROM django_pgqueue_job FOR UPDATE")
        turn_until(child, lambda: not child._settler.ready and len(child._settler) == 1)
        next_job = enqueue()
        child.wake()

        turn_until(child, lambda: next_job in {claim.job_id for claim in child._held})
        assert row(held_row, "status") == ("running",)
        sql(other, "ROLLBACK")

    turn_until(child, lambda: row(held_row, "status") == ("done",))


def test_jobs_of_a_claim_that_needs_no_transaction_go_back_when_what_follows_it_fails(make_child, monkeypatch):
    """R20: they are committed, and nobody would run them before their lease ends."""
    child = make_child()
    job_id = enqueue()
    with monkeypatch.context() as patch:
        patch.setattr(claiming, "earlier_attempts", _refuse_for_a_lock)
        turn_until(child, lambda: row(job_id, "status") == ("running",))
    assert not child._held
    child._retry_at = 0.0

    turn_until(child, lambda: {held.job.id: held.job.attempts for held in child._held.values()} == {job_id: 1})


def test_jobs_of_a_claim_that_was_rolled_back_are_not_run(make_child, monkeypatch):
    """R18, R20: what has ended is written all the same, one by one."""
    child = make_child(concurrency=2)
    ended, following = enqueue_jobs(2, priority=1), enqueue_jobs(2)
    turn_until(child, lambda: len(child._held) == 2)
    for held in list(child._held.values()):
        finish(child, held)
    child._slots.take_back()
    child.wake()
    with monkeypatch.context() as patch:
        patch.setattr(claiming, "earlier_attempts", _refuse_for_a_lock)
        child._turn()

    assert not child._held
    assert {row(job_id, "status") for job_id in ended} == {("done",)}
    assert {row(job_id, "status", "attempts") for job_id in following} == {("pending", 0)}


def test_after_a_look_that_failed_a_child_claims_at_once(make_child, monkeypatch):
    """R31: whoever has asked for that look will not ask again."""
    child = make_child()
    turn_until(child, lambda: child._claimer.rests_since)
    job_id = enqueue()
    child._claimer.ask(is_poll=False)
    wait_until(child._claimer.can_peek, "the next look")
    here("SELECT pg_terminate_backend(%s)", [child._session.connection.info.backend_pid])
    child._turn()
    assert child._retry_at

    turn_until(child, lambda: [claim.job_id for claim in child._held] == [job_id])


def test_a_child_asks_for_company_when_its_claims_are_published(make_child, monkeypatch):
    """R31: before that it would look idle, and be the one that is woken."""
    child = make_child()
    held_when_asking = []
    monkeypatch.setattr(child._voice, "say", lambda word: held_when_asking.append((word, len(child._holdings.read()))))
    enqueue_jobs(9)

    child._turn()

    assert held_when_asking == [(MORE_JOBS, 4)]


def test_a_name_that_another_begins_with_gives_nothing_of_that_back(make_child):
    """R20: test/1 is the beginning of test/10, and what is claimed under that may be under way."""
    child = make_child()
    job_id = enqueue()
    child._names._number = 10
    turn_until(child, lambda: child._held)
    child._names._old = {"test/1": time.monotonic() + 60}
    child._held.clear()
    child.wake()

    child._turn()

    assert row(job_id, "status", "claim_version", "claimed_by") == ("running", 1, "test/10")


def test_an_outage_without_a_claim_in_doubt_leaves_no_names_to_look_after(make_child, monkeypatch):
    child = make_child()
    enqueue()
    turn_until(child, lambda: child._held)
    child._session.close()

    def refuse(*args):
        raise psycopg.OperationalError("connection refused")

    monkeypatch.setattr(child._session, "_connect", refuse)
    for _ in range(50):
        child._retry_at = 0.0
        child.wake()
        child._turn()

    assert not child._names.has_old


def test_a_claim_whose_commit_was_not_answered_goes_back_also_after_an_outage_longer_than_its_lease(
    make_child, monkeypatch
):
    child = make_child(lease=1.0)
    job_id = enqueue()
    with monkeypatch.context() as patch:
        patch.setattr(claiming, "earlier_attempts", _commit_and_lose_the_connection)
        child._turn()
    assert row(job_id, "status", "claimed_by") == ("running", "test/1")
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 30)  # the database is away for that long
    with monkeypatch.context() as patch:
        patch.setattr(child._session, "_connect", _refuse)
        child._turn()
    child._retry_at = 0.0

    child._turn()

    # Released, its attempt refunded, and claimed once more in the same round.
    [held] = child._held
    assert held == (job_id, 3)
    assert row(job_id, "attempts", "claimed_by") == (1, "test/2")


def test_nothing_is_claimed_while_receivers_are_far_behind(make_child, monkeypatch):
    child = make_child()
    enqueue()
    monkeypatch.setattr(announcer, "FAR_BEHIND", 0)

    pause = child._turn()
    assert not child._held
    assert 0 < pause <= 1
    monkeypatch.setattr(announcer, "FAR_BEHIND", 1)
    child.wake()
    turn_until(child, lambda: len(child._held) == 1)


def test_the_end_of_the_grace_period_is_not_slept_over_while_the_database_is_away(make_child, monkeypatch):
    child = make_child()
    enqueue()
    child._turn()
    [held] = child._held.values()
    child._slots.take_back()
    finish(child, held)
    child._retry_at = time.monotonic() + 100

    child.stop(grace=0.5)

    assert child._turn() <= 0.5


def test_a_burst_looks_again_after_a_job_whose_claim_was_lost(make_child):
    """It may have enqueued others before."""
    child = make_child(burst=True)
    enqueue()
    child._turn()
    child._turn()
    [held] = child._held.values()
    here("UPDATE django_pgqueue_job SET claim_version = 7")
    child._said_lost.put((held.claim, ClaimLost))
    child._mark_lost()
    child._claimer.is_drained = True
    finish(child, held)

    child._collect_finished()

    assert not child._held
    assert not child._is_finished()
    assert Job.objects.get().status == "running"


def test_the_deadline_of_a_lost_job_is_not_written_to_the_place_of_another(make_child):
    """Cancelling a statement takes its time; meanwhile the second has ended, and a third has its place."""
    child = make_child()
    enqueue_jobs(2)
    child._turn()
    first, second = child._held.values()
    child._slots.take_back()
    child._slots._running.update({1: first, 2: second})
    third = enqueue()

    def take_the_place(reason):
        del child._slots._running[2]
        finish(child, second)
        child._collect_finished()
        child._hand_over(Round(Settlement(), 1, [claim_one()], {}, lease_ends=time.monotonic() + 60))

    first.code, second.code = FakeCode(take_the_place), FakeCode(lambda reason: None)
    for held in (first, second):
        child._said_lost.put((held.claim, ClaimLost))
    child._mark_lost()

    child._interrupter._look()

    deadlines = {entry.claim: entry.deadline for entry in child._holdings.read()}
    assert 0 < deadlines[first.claim] <= time.monotonic()
    assert deadlines[Claim(third, 1)] == 0.0


class FakeCode:
    """A task whose interruption is what the test wants."""

    reason = None

    def __init__(self, interrupt):
        self.interrupt = interrupt


def test_a_round_that_failed_after_its_claim_neither_ends_a_burst_nor_waits_for_the_poll(make_child, monkeypatch):
    child = make_child(burst=True)
    enqueue()
    with monkeypatch.context() as patch:
        patch.setattr(claiming, "earlier_attempts", _refuse)
        child._turn()

    assert not child._is_finished()
    child._retry_at = 0.0
    child._turn()

    assert len(child._held) == 1


def test_a_child_that_has_run_its_number_of_jobs_looks_for_no_others(make_child, monkeypatch):
    child = make_child(max_jobs=1)
    enqueue_jobs(3)
    child._turn()
    [held] = child._held.values()
    child._slots.take_back()
    finish(child, held)
    monkeypatch.setattr(child._claimer, "claim", None)

    child._turn()

    assert child._is_finished()


def test_an_error_that_only_a_claim_meets_is_told_at_once_as_a_warning(make_child, caplog):
    child = make_child()
    enqueue()
    here("ALTER TABLE django_pgqueue_jobattempt RENAME TO elsewhere")
    try:
        here("UPDATE django_pgqueue_job SET attempts = 1")
        with caplog.at_level(logging.WARNING, "django_pgqueue"):
            for _ in range(3):
                child._retry_at = 0.0
                child._turn()
    finally:
        here("ALTER TABLE elsewhere RENAME TO django_pgqueue_jobattempt")

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "manage.py migrate" in caplog.text


def test_the_end_of_an_outage_is_told_only_when_the_database_has_answered(monkeypatch, caplog):
    upkeep = Upkeep(worker_config(), "test", children=list)
    upkeep._renewed_at -= 1_000  # so that recovery waits for a renewal, and there is nothing to renew
    monkeypatch.setattr(upkeep, "_sleep", lambda seconds: None)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "django_pgqueue"):
        patch.setattr(upkeep._session, "_connect", _refuse)
        for duty in [*reversed(upkeep._duties), *upkeep._duties]:
            upkeep._do(duty)
        assert [record.getMessage()[:29] for record in caplog.records] == ["The database is not available"]

    with caplog.at_level(logging.INFO, "django_pgqueue"):
        for duty in upkeep._duties:
            upkeep._do(duty)

    assert [record.getMessage()[:26] for record in caplog.records[1:]] == ["The database answers again"]
    upkeep._session.close()


@pytest.fixture
def upkeep():
    upkeep = Upkeep(worker_config(lease=60.0), "test", children=list)
    yield upkeep
    upkeep._session.close()


def expire(job_id, seconds_ago):
    here(
        "UPDATE django_pgqueue_job SET lease_until = clock_timestamp() - make_interval(secs => %s) WHERE id = %s",
        [seconds_ago, job_id],
    )


def test_recovery_looks_back_a_lease_before_its_last_look_and_once_a_minute_at_all(upkeep):
    """R19, R33: dead entries of leases are walked once; what was locked at the last look is met again."""
    recent, old = enqueue_jobs(2)
    claim_one(), claim_one()
    upkeep._recover()
    assert upkeep._recovered_at == upkeep._recovered_all_at > 0

    expire(recent, 59)
    expire(old, 3_600)
    upkeep._recover()
    assert [row(job_id, "status") for job_id in (recent, old)] == [("pending",), ("running",)]

    upkeep._recovered_all_at -= 61
    upkeep._recover()
    assert row(old, "status") == ("pending",)


def test_recovery_looks_at_all_leases_after_an_outage(upkeep, monkeypatch):
    """R19: nobody knows what has happened while nobody could look."""
    [job_id] = enqueue_jobs(1)
    claim_one()
    upkeep._recover()
    expire(job_id, 3_600)
    with monkeypatch.context() as patch:
        patch.setattr(upkeep._session, "_connect", _refuse)
        patch.setattr(upkeep, "_sleep", lambda seconds: None)
        upkeep._session.close()
        upkeep._do(next(duty for duty in upkeep._duties if duty.do == upkeep._recover))
    upkeep._renew()
    upkeep._recover()
    upkeep._back_at -= 100

    upkeep._recover()

    assert row(job_id, "status") == ("pending",)


def test_recovery_that_stops_at_its_number_of_rows_goes_on_from_there(upkeep, monkeypatch):
    """R19: the look is over when nothing is left."""
    monkeypatch.setattr(upkeep_module, "RECOVERY_ROWS", 2)
    ids = enqueue_jobs(3)
    for _ in ids:
        claim_one()
    for job_id in ids:
        expire(job_id, 3_600)

    upkeep._recover()
    upkeep._recover()

    assert set(Job.objects.values_list("status", flat=True)) == {"pending"}


def test_expired_leases_are_not_recovered_before_our_own_were_renewed():
    """After an outage longer than a lease, what our child holds looks as if its worker were dead."""
    upkeep = Upkeep(worker_config(), "test", children=list)
    enqueue()
    job = claim_one()
    expire_lease(job.id)
    upkeep._renewed_at -= 1_000

    upkeep._recover()
    assert row(job.id, "status") == ("running",)
    upkeep._renew()
    upkeep._recover()

    assert row(job.id, "status") == ("pending",)
    upkeep._session.close()


def test_a_worker_that_has_just_started_leaves_others_a_moment_to_come_back():
    """It may have waited for the same database as they have, and is as good as one that was away."""
    upkeep = Upkeep(worker_config(lease=6.0), "test", children=list)
    enqueue()
    job = claim_one()
    expire_lease(job.id)
    recovering = next(duty for duty in upkeep._duties if duty.do == upkeep._recover)
    pauses = []
    recover = recovering.do
    recovering.do = lambda: pauses.append(recover()) or pauses[-1]

    upkeep.start()
    wait_until(lambda: pauses, "the first look")
    upkeep.stop(10.0)

    assert 0 < pauses[0] <= 6.0
    assert row(job.id, "status") == ("running",)


def test_the_pause_between_two_tries_to_connect_leaves_room_for_a_renewal(monkeypatch):
    """Also where leases are short: the others wait no longer than a lease."""
    upkeep = Upkeep(worker_config(lease=3.0), "test", children=list)
    pauses = []
    monkeypatch.setattr(upkeep, "_sleep", pauses.append)
    monkeypatch.setattr(upkeep._session, "_connect", _refuse)

    for _ in range(20):
        upkeep._do(Duty(upkeep._report_worker))

    assert max(pauses) == 1.0


def test_what_a_dead_childs_last_statement_commits_after_all_is_put_in_order():
    """R19: its process is gone, and its backend has not noticed; so one look is not enough."""
    upkeep = Upkeep(worker_config(), "test", children=list)
    death = Death("host:1:abc", "pgqueue child abc", [], "SIGKILL", time.monotonic(), is_ours=False)
    job_id = enqueue()
    backend = Session("default", death.application_name)
    execute(backend.connection, "BEGIN")
    bands = claiming.due(claiming.sweep(backend.connection, None))
    assert claiming.claim(backend.connection, bands, f"{death.owner}/1", 1, 60.0)

    is_over = [upkeep._bury(death)]
    execute(backend.connection, "COMMIT")
    is_over.append(upkeep._bury(death))
    status_and_attempts = row(job_id, "status", "attempts")
    backend.close()
    wait_until(lambda: upkeep._bury(death), "the backend to end")

    assert is_over == [False, False]
    assert status_and_attempts == ("pending", 0)
    upkeep._session.close()


def _refuse(*args):
    raise psycopg.OperationalError("connection refused")


def _commit_and_lose_the_connection(connection, jobs):
    connection.execute("COMMIT")
    connection.close()
    raise psycopg.OperationalError("the connection is lost")


def test_of_two_claims_of_one_job_the_older_is_lost():
    """R18: a child that lost a claim and took the job again may still run the first attempt."""
    claims = [Claim(7, 3), Claim(8, 1), Claim(7, 1)]

    held, superseded = _newest(claims)

    assert sorted(held) == [Claim(7, 3), Claim(8, 1)]
    assert superseded == [Claim(7, 1)]


def test_a_child_that_uses_too_much_memory_from_its_start_is_not_replaced_before_it_has_run_something(make_child):
    """The next one would be as large, and they would follow each other without a pause."""
    child = make_child(max_memory=1)
    enqueue()
    child._turn()
    child._mind_memory()
    assert not child._is_finished()

    [held] = child._held.values()
    child._slots.take_back()
    finish(child, held)
    child._turn()
    child._mind_memory()

    assert child._is_finished()


def test_a_child_that_waits_for_receivers_at_its_end_shows_that_it_has_not_hung(make_child):
    """Else it would be killed after half a minute, and what they have not been told yet would never be said."""
    child = make_child(burst=True)
    may_end = threading.Event()
    child._announcer._thread = threading.Thread(target=may_end.wait, daemon=True)

    running = InThread(child.run)
    wait_until(lambda: child._interrupter.ident and not child._interrupter.is_alive(), "the end of the loop")
    looped = child._holdings.vitals().looped
    wait_until(lambda: child._holdings.vitals().looped > looped, "a sign of life")
    may_end.set()

    assert running.result() == 0
