"""Where a child begins to look for jobs, and that nothing is missed below: what commits late, comes back, is new."""

import itertools
import random
import time
from datetime import timedelta
from types import SimpleNamespace

import psycopg
import pytest
from django.utils import timezone

from django_pgqueue.models import Job
from django_pgqueue.outcomes import Claim, ErrorRecord, Retried, Snoozed
from django_pgqueue.statements import claim as claiming
from django_pgqueue.worker import floors as floors_module
from django_pgqueue.worker.claimer import Claimer
from django_pgqueue.worker.config import Queues
from django_pgqueue.worker.floors import Floors

from .helpers import actor, enqueue, enqueue_jobs, here, make_due, sql, wait_until, worker_config, worker_session

pytestmark = pytest.mark.django_db(transaction=True)


CLOSE_BEHIND = floors_module.CLOSE_BEHIND


@pytest.fixture(autouse=True)
def at_the_floor(monkeypatch):
    """Let claims begin at their floors, so that what comes below is there for looks to find."""
    monkeypatch.setattr(floors_module, "CLOSE_BEHIND", 1)


@pytest.fixture
def below_the_floor(monkeypatch, at_the_floor):
    """Let claims begin where they do."""
    monkeypatch.setattr(floors_module, "CLOSE_BEHIND", CLOSE_BEHIND)


@pytest.fixture
def session():
    with worker_session() as session:
        yield session


@pytest.fixture
def claimer():
    return Claimer(worker_config())


@pytest.fixture
def dear(monkeypatch):
    """Let every look take longer than is good, as with a million dead entries."""
    monkeypatch.setattr(floors_module, "DEAR_SECONDS", 0.0)


@pytest.fixture
def cheap(monkeypatch):
    """Let no look take too long, however busy this machine is."""
    monkeypatch.setattr(floors_module, "DEAR_SECONDS", 1e9)


def claim(session, claimer, wanted=10):
    with session.round() as connection:
        return [job.id for job in claimer.claim(connection, "worker/1", wanted)]


def claim_all(session, claimer, count, wanted=10):
    """Claim until *count* jobs have been claimed, with no pause but those that looks need."""
    ids = []

    def claimed_all():
        ids.extend(claim(session, claimer, wanted))
        return len(ids) >= count

    wait_until(claimed_all, f"{count} jobs to be claimed")
    return ids


def floors_of(claimer):
    return {(band.queue_name, band.priority): (band.floor_at, band.floor_id) for band in claimer._floors.bands()}


# ---- floors


def test_a_claim_raises_the_floor_of_each_band_to_the_last_job_it_took(session, claimer):
    """R33."""
    high, low = enqueue_jobs(3, priority=5), enqueue_jobs(3)

    claim_all(session, claimer, 4, wanted=4)

    def key(job_id):
        return Job.objects.get(pk=job_id).available_at.timestamp(), job_id

    assert floors_of(claimer) == {
        ("default", 5): pytest.approx(key(high[2])),
        ("default", 0): pytest.approx(key(low[0])),
    }


def test_a_claim_at_its_floor_finds_what_comes_later_without_looking(session, claimer, monkeypatch):
    """R33: the walk over what has ended is spared, not the jobs behind it."""
    enqueue_jobs(3)
    claim_all(session, claimer, 3)
    monkeypatch.setattr(claimer._floors, "look", None)
    ids = enqueue_jobs(3)

    assert claim(session, claimer, 3) == ids


def test_a_claim_that_finds_nothing_leaves_the_floors_where_they_are(session, claimer, cheap):
    enqueue_jobs(3)
    claim_all(session, claimer, 3)
    before = floors_of(claimer)

    claim(session, claimer)

    assert floors_of(claimer) == before


def test_a_floor_is_never_in_the_future(session, claimer, monkeypatch):
    """R03, R33: a job of next year must not hide those of today, not even until the next look."""
    tomorrow = enqueue(run_after=timezone.now() + timedelta(days=1))
    claim(session, claimer)
    today = enqueue()

    with monkeypatch.context() as patch:
        patch.setattr(claimer._floors, "look", None)
        assert claim(session, claimer, 1) == [today]
    make_due(tomorrow)
    assert claim_all(session, claimer, 1) == [tomorrow]


def test_a_job_that_a_look_found_does_not_hide_when_the_next_one_is_due(session, claimer):
    """R03, R31: what follows it is looked at before the child rests."""
    due = enqueue()
    enqueue(run_after=timezone.now() + timedelta(seconds=50))

    assert claim_all(session, claimer, 1) == [due]
    wait_until(lambda: time.monotonic() >= claimer.at and not claim(session, claimer), "the next look")

    assert time.monotonic() + 40 < claimer.at < time.monotonic() + 50


def test_the_bands_of_one_priority_are_served_from_the_lowest_floor(session, claimer):
    """R05: a long backlog in one queue does not keep another waiting."""
    enqueue_jobs(6, queue_name="long")
    other = enqueue(queue_name="other")
    enqueue_jobs(6, queue_name="long")

    ids = claim_all(session, claimer, 13, wanted=1)

    assert abs(ids.index(other) - 6) <= 1


# ---- what comes below a floor


def test_a_job_whose_transaction_was_open_while_later_ones_were_claimed_is_found(session, claimer):
    """R33, B22: it stands below the floor when it appears."""
    with actor() as late:
        sql(late, "BEGIN")
        sql(late, INSERT_SQL)
        later = enqueue_jobs(5)
        assert claim_all(session, claimer, 5) == later
        sql(late, "COMMIT")

    [job_id] = claim_all(session, claimer, 1)

    assert job_id < later[0]


def test_a_steady_stream_of_jobs_does_not_keep_a_child_from_looking_for_late_ones(session, claimer):
    """R31, R33: woken again and again, it finds a job each time, and not all that it could take."""
    with actor() as late:
        sql(late, "BEGIN")
        [(late_id,)] = sql(late, INSERT_SQL)
        enqueue()
        claim_all(session, claimer, 1)
        sql(late, "COMMIT")

    def is_found_beside_others():
        wait_until(claimer._floors.must_look, "the next look that cannot wait")
        enqueue()
        claimer.wake()
        assert claimer.is_due(time.monotonic())
        if claimer.can_peek():
            assert claimer.peek(session.connection), "of the job that it was woken for"
        return late_id in claim(session, claimer)

    assert [is_found_beside_others() for _ in range(2)].count(True) == 1


def test_what_was_claimed_is_not_kept_waiting_for_a_look(session, claimer, monkeypatch):
    """R31: it begins first, though more may be there."""
    enqueue()
    claim_all(session, claimer, 1)
    wait_until(claimer._floors.must_look, "the next look")
    monkeypatch.setattr(claimer._floors, "look", None)
    claimer.wake()
    assert claimer.is_due(time.monotonic())
    [job_id] = enqueue_jobs(1)
    before = time.monotonic()

    assert claim(session, claimer) == [job_id]
    assert claimer.at >= before + floors_module.SHORTEST_IDLE_PAUSE_SECONDS, "nor for one at once after it"


def test_a_claim_that_was_rolled_back_beside_the_floor_is_found_again(session, claimer):
    """R20, R33: what another worker held when this one passed comes back below its floor."""
    ids = enqueue_jobs(5)
    with actor() as other:
        sql(other, "BEGIN")
        assert [job.id for job in claiming.claim(other, claiming.due(claiming.sweep(other)), "other/1", 2, 60)] == ids[
            :2
        ]
        assert claim_all(session, claimer, 3) == ids[2:]
        sql(other, "ROLLBACK")

    assert claim_all(session, claimer, 2) == ids[:2]


@pytest.mark.parametrize(
    "ending",
    [lambda claim: Retried(claim, 0.0, ErrorRecord.plain(ValueError, "no")), lambda claim: Snoozed(claim, 0.0)],
    ids=["retried", "snoozed"],
)
def test_what_becomes_pending_again_lands_above_the_floor(session, claimer, ending, monkeypatch):
    """R23, R33: it is put behind those that wait, and needs no look."""
    first = enqueue_jobs(3)[0]
    claim_all(session, claimer, 3)
    monkeypatch.setattr(claimer._floors, "look", None)
    Job.objects.settle([ending(Claim(first, 1))])

    assert claim(session, claimer, 1) == [first]


def test_a_busy_child_finds_new_bands_too(session, claimer):
    """R05: one that always finds as many jobs as it asks for would never look otherwise."""
    enqueue_jobs(5)
    claim(session, claimer, 1)
    enqueue_jobs(2_000)
    urgent = enqueue(queue_name="new", priority=100)

    def claims_it():
        assert Job.objects.filter(status="pending").count() > 5, "the backlog is used up"
        return urgent in claim(session, claimer, 1)

    wait_until(claims_it, "the urgent job to be claimed before the backlog")


def test_a_job_that_someone_holds_below_the_floor_lets_no_claim_begin_there_but_the_one_after_a_look(
    session, claimer, cheap
):
    """R33: whoever holds it for long keeps vacuum from working, too, and all between would be walked each time."""
    held, *others = enqueue_jobs(5)
    with actor() as holder:
        sql(holder, "BEGIN")
        sql(holder, "SELECT 1 FROM django_pgqueue_job WHERE id = %s FOR UPDATE", [held])
        assert claim_all(session, claimer, 4) == others
        above = floors_of(claimer)
        for _ in range(5):
            wait_until(claimer._floors.may_look, "the next look")
            assert claim(session, claimer) == []
            assert floors_of(claimer) == above
        [late] = enqueue_jobs(1)
        assert claim_all(session, claimer, 1) == [late]
        sql(holder, "ROLLBACK")

    assert claim_all(session, claimer, 1) == [held]
    assert floors_of(claimer)["default", 0][1] == late, "and the floor does not fall behind"


def test_what_a_look_lets_a_claim_walk_over_is_paid_for_like_the_look(claimer):
    """R33."""
    floors = claimer._floors
    floors._clock_offset = time.time() - time.monotonic()
    floors._lower(claiming.Band("default", 0, time.time(), 5, 0.0))
    floors.claimed([], 10, took=50.0)
    assert floors.may_look()
    floors._lower(claiming.Band("default", 0, time.time() - 60, 3, -60.0))

    floors.claimed([], 10, took=50.0)

    assert floors.look_later_at > time.monotonic() + 4


def test_a_claim_that_was_filled_is_followed_by_a_look_and_a_second_one_by_a_third(session, claimer):
    """R31: with one slot all are filled, and most of the time nothing is left; a backlog needs no looks."""
    enqueue_jobs(3)
    claim_all(session, claimer, 3)
    wait_until(claimer._floors.may_look, "the next look")
    ids = enqueue_jobs(5)

    assert claim(session, claimer, 1) == ids[:1]
    assert claimer.at <= time.monotonic()
    assert claimer.can_peek()
    assert claimer.peek(session.connection)
    assert claim(session, claimer, 1) == ids[1:2]
    assert claimer.at == 0.0
    assert not claimer.can_peek()
    assert claim(session, claimer, 3) == ids[2:]
    wait_until(claimer._floors.may_look, "the next look")
    assert claim(session, claimer, 1) == []
    for _ in range(2):
        enqueue()
        claim_all(session, claimer, 1, wanted=1)
        wait_until(claimer.can_peek, "the next look")
        assert not claimer.peek(session.connection), "nothing is left"


def test_looks_that_are_dear_keep_no_claim_waiting(claimer, session):
    """R33: where one was filled there may be more, and whether there is has its price."""
    enqueue()
    claim_all(session, claimer, 1)
    claimer._floors._may_look_at = time.monotonic() + 1_000
    [job_id] = enqueue_jobs(1)

    assert claim(session, claimer, 1) == [job_id]
    assert claimer.at < time.monotonic() + 1
    assert not claimer.can_peek()


# ---- what comes close below a floor


def test_a_job_that_commits_behind_later_ones_is_claimed_without_a_look(session, claimer, below_the_floor, monkeypatch):
    """R33: who commits within a fraction of a second waits for nothing else."""
    enqueue_jobs(3)
    claim_all(session, claimer, 3)
    with actor() as late:
        sql(late, "BEGIN")
        [(late_id,)] = sql(late, INSERT_SQL)
        later = enqueue_jobs(CLOSE_BEHIND - 1)
        assert sorted(claim_all(session, claimer, len(later), wanted=50)) == later
        before = claimer._floors._bands["default", 0]
        monkeypatch.setattr(claimer._floors, "look", None)
        sql(late, "COMMIT")

    assert claim(session, claimer, 1) == [late_id]
    assert claimer._floors._bands["default", 0] == before, "the floor does not fall behind"


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("size", [1, 30, 500])
def test_a_claim_walks_over_a_limited_number_of_ended_jobs(below_the_floor, share, size):
    """R33: of a second and of its child's own, whatever the size of its claims; children of a worker share them."""
    floors = Floors(Queues(), share)
    floors._lower(claiming.Band("default", 0, 0.0, 0, 0.0))
    ids = itertools.count(1)

    def claim_jobs(count, available_at):
        for _ in range(count // size):
            jobs = [
                SimpleNamespace(queue_name="default", priority=0, available_at=available_at, id=next(ids))
                for _ in range(size)
            ]
            floors.claimed(jobs, size, took=0.0)
        [band] = floors.bands()
        return jobs[-1].id + 1 - band.floor_id

    assert claim_jobs(1_500, 10.0) == CLOSE_BEHIND // share
    assert claim_jobs(size, 11.5) == min(size, CLOSE_BEHIND // share)


# ---- when looking is dear


def test_once_looks_are_dear_they_reach_back_a_second_and_the_rest_is_looked_at_behind_them(session, claimer, dear):
    """R33: what is older than the reach is found all the same, a piece at a time."""
    enqueue_jobs(5)
    claim_all(session, claimer, 5)
    wait_until(lambda: not claim(session, claimer) and claimer._floors._reach == 1.0, "two dear looks")
    old = enqueue()
    here("UPDATE django_pgqueue_job SET available_at = now() - interval '1 hour' WHERE id = %s", [old])
    claimer._floors._oldest = time.time() - 7200
    assert claim(session, claimer) == []

    assert claim_all(session, claimer, 1) == [old]


def test_what_is_behind_the_reach_is_looked_at_in_pieces_from_new_to_old(session, claimer, dear, monkeypatch):
    enqueue_jobs(1)
    claim_all(session, claimer, 1)
    wait_until(lambda: not claim(session, claimer) and claimer._floors._reach == 1.0, "two dear looks")
    monkeypatch.setattr(floors_module, "SHORTEST_BUSY_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(floors_module, "BUSY_PAUSES", 0)
    claimer._floors._oldest = time.time() - 600
    claimer._floors._look_behind_at = 0.0
    pieces = []

    def note(connection, parts, *others):
        pieces.extend((part.since, part.until) for part in parts)
        return claiming.Sweep([], time.time())

    monkeypatch.setattr(floors_module, "sweep_parts", note)
    for _ in range(20):
        claimer._floors.look_behind(session.connection)
    one_pass = pieces[: [since for since, _ in pieces].index(float("-inf")) + 1]

    assert len(one_pass) > 2
    assert [until for _, until in one_pass[1:]] == [since for since, _ in one_pass[:-1]], "nothing is left out"
    assert pieces[len(one_pass)][1] > one_pass[0][1] - 1, "and again from the newest"


def test_a_child_that_is_told_of_more_jobs_looks_for_new_ones_whatever_lies_behind(session, claimer, dear):
    """R31: a poll would look behind now, and for the new ones next time."""
    enqueue_jobs(1)
    claim_all(session, claimer, 1)
    wait_until(lambda: not claim(session, claimer) and claimer._floors._reach == 1.0, "two dear looks")
    claimer._floors._look_behind_at = 0.0
    assert claimer._floors.has_behind
    enqueue()
    claimer.ask(is_poll=False)
    wait_until(claimer.can_peek, "the next look")

    assert claimer.peek(session.connection)


def test_what_a_filled_claim_has_left_is_looked_for_whatever_lies_behind(session, claimer, dear):
    """R31: a look behind is no such look. After it the child would neither rest, to be rung, nor look by itself."""
    enqueue_jobs(1)
    claim_all(session, claimer, 1)
    wait_until(lambda: not claim(session, claimer) and claimer._floors._reach == 1.0, "two dear looks")
    enqueue()
    claimer._floors._look_behind_at = float("inf")
    assert claim_all(session, claimer, 1, wanted=1)
    claimer._floors._look_behind_at = 0.0
    assert claimer._floors.has_behind
    wait_until(claimer.can_peek, "the next look")

    assert not claimer.peek(session.connection)
    assert claimer.rests_since
    claimer.ask(is_poll=True)
    wait_until(claimer.can_peek, "a look that nobody owes")
    assert not claimer.peek(session.connection)
    assert claimer._is_behind_s_turn


def test_a_job_that_becomes_due_right_after_the_look_that_saw_it_is_not_slept_over(monkeypatch):
    """R23."""
    clock = SimpleNamespace(now=1_000.0, monotonic=lambda: clock.now)
    floors = Floors(Queues())
    band = claiming.Band("default", 0, first_available_at=5_000.001, first_id=1, due_in=0.001)
    locked = claiming.Band("default", 1, first_available_at=4_000.0, first_id=2, due_in=-1_000.0)
    monkeypatch.setattr(floors_module, "time", clock)
    monkeypatch.setattr(floors_module, "sweep_parts", lambda *parameters: claiming.Sweep([band, locked], 5_000.0))
    floors.look(None)
    assert floors.next_due_in() == pytest.approx(0.001)

    clock.now += 0.002

    assert floors.next_due_in() == 0.0


def test_an_empty_band_s_floor_follows_the_clock_when_others_empty_it(session, claimer, dear):
    """R33: the entries that they leave are walked once, not at each claim."""
    enqueue_jobs(3)
    claim_all(session, claimer, 3)
    here("UPDATE django_pgqueue_job SET available_at = now() - interval '1 hour'")
    claimer._floors._bands["default", 0] = claimer._floors._bands["default", 0]._replace(floor_at=0.0, floor_id=0)
    wait_until(claimer._floors.may_look, "the next look")

    claim(session, claimer)

    assert time.time() - floors_of(claimer)["default", 0][0] < 60


def test_a_look_is_paid_for_with_a_pause(monkeypatch):
    """
    R33: idle twenty times as long as it took beyond 2 ms, busy a hundred; as many times longer as children look.

    Not one that is slow by accident, and none for ever: with twenty children it would be minutes without a new band.
    """
    clock = SimpleNamespace(now=1_000.0, monotonic=lambda: clock.now)

    def look_for(*looks, share):
        floors = Floors(Queues(), share)
        rest = iter(looks)

        def sweep(*parameters):
            clock.now += next(rest)
            return claiming.Sweep([], 0.0)

        monkeypatch.setattr(floors_module, "sweep_parts", sweep)
        for _ in looks:
            floors.look(None)
        return pytest.approx((floors._may_look_at - clock.now, floors._look_at - clock.now))

    monkeypatch.setattr(floors_module, "time", clock)

    assert look_for(0.102, 0.302, share=1) == (2.0, 10.0)
    assert look_for(0.302, 0.102, share=3) == (6.0, 30.0)
    assert look_for(50.0, 50.0, share=1) == (5.0, 25.0)
    for looks in ((50.0,), (50.0, 0.002), (0.000_001, 50.0)):
        assert look_for(*looks, share=1) == (0.004, 0.1)
        assert look_for(*looks, share=3) == (0.012, 0.3)


def test_a_look_that_fails_is_not_paid_for(session):
    """It has shown nothing, and is made again."""
    floors = Floors(Queues())
    with actor() as other:
        sql(other, "BEGIN")
        sql(other, "LOCK TABLE django_pgqueue_job IN ACCESS EXCLUSIVE MODE")
        session.connection.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            floors.look(session.connection)

    assert floors.may_look()


# ---- which bands


def test_bands_that_stay_empty_are_forgotten(session, claimer, cheap, monkeypatch):
    """R33: claims visit every band, and names of queues may be as many as customers."""
    monkeypatch.setattr(floors_module, "FORGET_SECONDS", 0.0)
    for number in range(20):
        enqueue(queue_name=f"customer {number}")
    claim_all(session, claimer, 20)

    def all_are_forgotten():
        claim(session, claimer)
        return not floors_of(claimer)

    wait_until(all_are_forgotten, "the bands to be forgotten")
    job_id = enqueue(queue_name="customer 3")
    assert claim_all(session, claimer, 1) == [job_id]


@pytest.mark.parametrize(
    ("queues", "served"),
    [
        (Queues(), {"a", "b", "c", "d"}),
        (Queues(named=("b", "d", "x")), {"b", "d"}),
        (Queues(excluded=("a", "c")), {"b", "d"}),
        (Queues(named=("a", "b"), excluded=("a",)), {"b"}),
        (Queues(excluded=("d", "e")), {"a", "b", "c"}),
    ],
)
def test_a_look_finds_the_bands_of_the_queues_that_are_served_whatever_is_known(session, queues, served):
    """R12."""
    wanted = {(name, priority) for name in "abcd" for priority in (-100, 0, 7, 100) if name in served}
    for name in "abcd":
        for priority in (-100, 0, 7, 100):
            enqueue(queue_name=name, priority=priority)
    places = sorted(wanted)

    for seed in range(30):
        floors = Floors(queues)
        known = random.Random(seed).sample(places, seed % (len(places) + 1))
        for name, priority in known:
            floors._lower(claiming.Band(name, priority, 0.0, 0, 0.0))
        floors.look(session.connection)

        assert {(band.queue_name, band.priority) for band in floors.bands()} == wanted
        assert floors.any_due()


def test_the_order_of_queue_names_is_the_database_s(session):
    """R12: in a collation that is not Python's, a gap between two names is another."""
    names = ["a", "B", "c", "Z", "ä", "-", "_x", "Ab", "aC"]
    for name in names:
        enqueue(queue_name=name)

    for seed in range(20):
        known = [claiming.Part(name, 0) for name in random.Random(seed).sample(names, seed % len(names))]
        found = claiming.sweep_parts(session.connection, known).bands
        assert sorted(band.queue_name for band in found) == sorted(names)


# ---- all together


def test_nothing_is_missed_whatever_commits_late_or_is_rolled_back(session, monkeypatch):
    """R20, R33: random transactions, some of which take long; each committed job is claimed, once."""
    dice = random.Random(20)
    monkeypatch.setattr(floors_module, "SHORTEST_BUSY_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(floors_module, "CLOSE_BEHIND", 4)
    mine, theirs = Claimer(worker_config()), Claimer(worker_config())
    committed, claimed = [], []
    with actor() as a, actor() as b, actor() as c, worker_session() as other:
        open_on = {}
        for step in range(400):
            connection = dice.choice([a, b, c])
            if connection in open_on:
                if dice.random() < 0.5:
                    continue
                ids = open_on.pop(connection)
                if dice.random() < 0.2:
                    sql(connection, "ROLLBACK")
                else:
                    sql(connection, "COMMIT")
                    committed += ids
            else:
                sql(connection, "BEGIN")
                open_on[connection] = [sql(connection, INSERT_SQL)[0][0] for _ in range(dice.randint(1, 3))]
            if dice.random() < 0.7:
                claimed += claim(session, mine, dice.randint(1, 4))
            if dice.random() < 0.3:
                try:
                    with other.round() as round_:
                        theirs.claim(round_, "other/1", 3)
                        raise _GivenUp
                except _GivenUp:
                    theirs.failed()
            if step % 100 == 50:
                mine._floors._reach = dice.choice([1.0, float("inf")])
        for connection, ids in open_on.items():
            sql(connection, "COMMIT")
            committed += ids
        mine._floors._reach = float("inf")
        claimed += claim_all(session, mine, len(committed) - len(claimed))

    assert sorted(claimed) == sorted(committed)


class _GivenUp(Exception):
    pass


INSERT_SQL = """
INSERT INTO django_pgqueue_job (
    backend, queue_name, task_path, args, kwargs, status, priority,
    available_at, created_at, attempts, max_attempts, claim_version
)
VALUES ('default', 'default', 'tests.app.tasks.add', '[]', '{}', 'pending', 0,
        clock_timestamp(), clock_timestamp(), 0, 5, 0)
RETURNING id
"""
