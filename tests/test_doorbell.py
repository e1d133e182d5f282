"""
Falling asleep, being rung, and leaving: the doorbell's turns, one by one, in this process and on real connections.

Two people act: workers, whose children here are two moments that the test sets, and those who enqueue. Whatever could
happen between two turns happens there because the test says so.
"""

import os
import random
import threading
import time
from contextlib import contextmanager
from signal import SIGKILL, SIGTERM

import psycopg
import pytest
from django.db import DatabaseError, connections, transaction

from django_pgqueue.models import Job
from django_pgqueue.statements.bell import ANY_KEY, HANDOVER_CHANNEL
from django_pgqueue.statements.database import CHANNEL
from django_pgqueue.statements.enqueue import insert_job
from django_pgqueue.worker import doorbell as doorbells
from django_pgqueue.worker.config import Queues
from django_pgqueue.worker.connection import Session
from django_pgqueue.worker.doorbell import Doorbell
from django_pgqueue.worker.holdings import Vitals

from .app import tasks
from .app.worker_tasks import leave_mark, mark_and_wait_for
from .helpers import (
    PATIENCE_SECONDS,
    InThread,
    backend,
    claim_jobs,
    database_alias,
    enqueue,
    enqueue_jobs,
    fall_asleep,
    here,
    new_job,
    second_connection,
    sql,
    wait_for_lock_wait,
    wait_until,
    worker_config,
)
from .proxy import Proxy
from .servers import servers
from .test_database_away import programs as programs
from .workers import barrier, wait_for_mark, wait_for_status, who_sleeps

pytestmark = pytest.mark.django_db(transaction=True)

NEVER, NOW = 0.0, time.monotonic


class Worker:
    """A doorbell on connections of its own. Its one child rests, or has all its slots taken, as the test says."""

    def __init__(self, *names, excluded=(), **changes):
        queues = Queues(tuple(names), tuple(excluded))
        self.said = []  # to the child
        self.was_told_to_stop = False
        self._vitals = Vitals(NEVER, NEVER, NEVER, NEVER)
        self._session = Session("default", "test listener")
        self.bell = Doorbell(
            worker_config(queues=queues, **changes),
            children=lambda: [self],
            wake=lambda: self.said.append("claim"),
            look=lambda: self.said.append("look"),
            waiter=Session("default", "test bell"),
        )
        self.connect()

    def connect(self):
        self.connection = self._session.connection
        self._heard = []
        self.connection.add_notify_handler(self._heard.append)
        self.connection.execute(f"LISTEN {CHANNEL}; LISTEN {HANDOVER_CHANNEL}")
        self.bell.open(self.connection)

    def close(self):
        self.bell.close()
        self._session.close()

    # ---- the child

    def vitals(self):
        return self._vitals

    def rests(self):
        """The child has looked, and has a free slot and nothing for it."""
        self._vitals = self._vitals._replace(rested=NOW(), worked=NOW())
        return self

    def finds(self, *, all_it_wanted=False):
        """The child has found a job, and perhaps as many as it has slots."""
        moment = NOW()
        self._vitals = self._vitals._replace(worked=moment, found=moment, rested=NEVER if all_it_wanted else moment)
        return self

    def looked(self, began, *, has_found):
        """The child has looked, at the moment *began*, for one job."""
        rested = NEVER if has_found else began
        found = began if has_found else self._vitals.found
        self._vitals = self._vitals._replace(worked=NOW(), rested=rested, found=found)

    # ---- the doorbell

    def turn(self):
        """What the child was told since the last turn: after whatever was heard, and the turn."""
        self.connection.execute("SELECT 1")
        heard, self._heard[:] = list(self._heard), []
        if any(notification.channel == HANDOVER_CHANNEL for notification in heard):
            self.bell.handed_over()
        if rings := sum(notification.channel == CHANNEL for notification in heard):
            self.bell.rang(rings)
        self.bell.turn()
        said, self.said = self.said, []
        return said

    def turn_until(self, said):
        """Turn until the child is told *said*."""
        wait_until(lambda: said in self.turn(), f"the child to be told to {said}")

    def turn_until_it_sleeps(self):
        """Turn, with a child that looks and rests, until all locks are there."""
        wait_until(lambda: self.rests().turn() is not None and self.sleeps(), "it to sleep")

    def sleeps(self):
        """Whether this worker holds all locks that it needs."""
        return not self.bell._lacks_locks

    def fall_asleep(self):
        assert self.rests().turn() == ["look"]
        assert self.sleeps()
        self.rests().turn()
        return self


@pytest.fixture
def worker():
    made = []

    def make(*names, **changes):
        made.append(Worker(*names, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def advisory_locks():
    """How many advisory locks are held in this database."""
    return here(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )[0][0]


@contextmanager
def in_flight(**changes):
    """An enqueue, by someone else, whose transaction ends with the block."""
    with second_connection() as connection:
        sql(connection, "BEGIN")
        insert_job(connection, new_job(**changes))
        yield connection
        sql(connection, "COMMIT")


class TestFallingAsleep:
    def test_a_worker_that_rests_looks_once_more_when_enqueues_can_see_that_it_sleeps(self, worker):
        sleeper = worker()

        assert sleeper.turn() == []
        assert sleeper.rests().turn() == ["look"]
        assert sleeper.rests().turn() == []

        enqueue()
        assert sleeper.turn() == ["claim"]

    def test_while_nobody_sleeps_an_enqueue_notifies_nobody(self, worker):
        awake = worker().finds(all_it_wanted=True)
        awake.turn()

        enqueue()

        assert awake.turn() == []
        assert advisory_locks() == 0

    def test_an_enqueue_in_flight_is_waited_for_and_found_by_the_look_that_follows(self, worker):
        sleeper = worker().rests()
        with in_flight():
            assert "look" in sleeper.turn()  # for others that were in flight before, now and then
            assert not sleeper.sleeps()
            wait_for_lock_wait(connections["default"], sleeper.bell._second.info.backend_pid)

            enqueue()  # a queued waiter is as good as one who sleeps
            assert "claim" in sleeper.turn()

        wait_until(lambda: "look" in sleeper.turn() and sleeper.sleeps(), "the lock")
        sleeper.turn()
        sleeper.rests()
        sleeper.turn()
        enqueue()
        assert sleeper.turn() == ["claim"]

    def test_a_wait_that_takes_long_ends_begins_again_and_looks_meanwhile(self, worker, monkeypatch):
        monkeypatch.setattr(doorbells, "WAIT_SECONDS", 0.05)
        sleeper = worker().rests()
        with in_flight():
            waits = set()
            wait_until(lambda: (sleeper.turn() and waits.add(sleeper.bell._wait_until)) or len(waits) > 3, "four waits")
            assert not sleeper.sleeps()

        sleeper.turn_until_it_sleeps()

    def test_a_savepoint_that_is_rolled_back_does_not_let_the_others_job_be_missed(self, worker):
        sleeper = worker().rests()
        with transaction.atomic():
            enqueue()
            with transaction.atomic():
                enqueue()
                transaction.set_rollback(True)
            sleeper.turn()
            assert not sleeper.sleeps()

        sleeper.turn_until_it_sleeps()

    def test_jobs_of_the_future_ring_when_they_are_due_within_a_minute(self, worker):
        sleeper = worker().fall_asleep()
        moments = here("SELECT clock_timestamp() + interval '50 s', clock_timestamp() + interval '70 s'")[0]

        enqueue(run_after=moments[1])
        assert sleeper.turn() == []
        enqueue(run_after=moments[0])
        assert sleeper.turn() == ["claim"]


class TestLeaving:
    def test_single_jobs_wake_it_again_and_again_and_it_sleeps_on(self, worker):
        sleeper = worker().fall_asleep()

        for _ in range(20):
            enqueue()
            assert sleeper.turn() == ["claim"]
            sleeper.finds().turn()

        assert sleeper.sleeps()

    def test_one_that_is_rung_and_has_no_free_slot_hands_over(self, worker):
        leader, other = worker().fall_asleep(), worker().rests()
        assert other.turn() == []  # another one is the leader, and one of them is enough
        leader.finds(all_it_wanted=True).turn()
        assert leader.sleeps()

        enqueue()
        assert other.turn() == []
        wait_until(lambda: (leader.turn() and False) or not leader.bell.leads, "it to leave")

        assert other.turn() == ["look"]
        assert other.sleeps()

    def test_one_that_finds_more_than_it_can_take_hands_over(self, worker):
        leader, other = worker().fall_asleep(), worker().rests()
        other.turn()
        leader.finds(all_it_wanted=True)

        leader.bell.more_jobs()
        wait_until(lambda: leader.turn() or not leader.bell.leads, "it to leave")

        assert other.turn() == ["look"]

    def test_one_whose_children_do_not_answer_hands_over(self, worker, monkeypatch):
        monkeypatch.setattr(doorbells, "NO_ANSWER_SECONDS", 0.05)
        leader, other = worker().fall_asleep(), worker().rests()
        other.turn()

        enqueue()
        assert leader.turn() == ["claim"]
        wait_until(lambda: leader.turn() or not leader.bell.leads, "it to leave")

        assert other.turn() == ["look"]
        assert leader.turn() == []  # it does not take back what it has just given away

    def test_one_that_stops_hands_over_and_sleeps_no_more(self, worker):
        leader, other = worker().fall_asleep(), worker().rests()
        other.turn()

        leader.bell.retire()
        leader.turn()

        assert other.turn() == ["look"]
        leader.rests().turn()
        assert not leader.bell.leads

    def test_in_a_rush_it_lets_enqueues_be_silent_and_looks_by_itself_until_nothing_is_found(self, worker, monkeypatch):
        monkeypatch.setattr(doorbells, "RUSH_SECONDS", PATIENCE_SECONDS)
        leader = worker().fall_asleep()
        for _ in range(doorbells.RINGS_OF_A_RUSH):
            enqueue()
        assert "look" in leader.turn()
        assert advisory_locks() == 0

        for _ in range(5):
            leader.finds()
            leader.turn_until("look")
        assert advisory_locks() == 0

        leader.turn_until_it_sleeps()


class TestSeveralWorkers:
    def test_of_those_with_the_same_queues_one_alone_is_woken(self, worker):
        sleepers = [worker(excluded=["a", "b"]) for _ in range(3)]
        for sleeper in sleepers:
            sleeper.rests().turn()
            sleeper.rests().turn()

        enqueue(queue_name="c")

        assert [sleeper.turn() for sleeper in sleepers] == [["claim"], [], []]

    def test_those_with_other_queues_hear_the_bell_whoever_has_the_lock(self, worker):
        """The lock of "any queue" is one, and who has it need not serve the queue."""
        first, second = worker(excluded=["b"]).fall_asleep(), worker()
        assert second.rests().turn() == ["look"] or second.bell.leads
        second.rests().turn()

        enqueue(queue_name="b")

        assert second.turn() == ["claim"]
        assert first.bell._held == {ANY_KEY}
        assert second.bell._held == set()

    def test_a_named_queue_has_a_lock_of_its_own(self, worker):
        mail, slow = worker("email").fall_asleep(), worker("slow", "slower").fall_asleep()

        enqueue(queue_name="default")
        assert (mail.turn(), slow.turn()) == ([], [])
        enqueue_jobs(5, queue_name="email")
        assert "claim" in mail.turn()
        enqueue(queue_name="slower")
        assert "claim" in slow.turn()

    def test_a_worker_of_many_queues_sleeps_on_the_lock_of_any(self, worker):
        many = worker(*(f"queue {n}" for n in range(50))).fall_asleep()

        enqueue(queue_name="queue 49")

        assert many.turn() == ["claim"]
        assert advisory_locks() == 2

    def test_the_next_one_is_woken_after_the_death_of_the_first(self, worker, monkeypatch):
        monkeypatch.setattr(doorbells, "TRY_AGAIN_SECONDS", 0.05)
        leader, other = worker().fall_asleep(), worker().rests()
        other.turn()

        here("SELECT pg_terminate_backend(%s)", [leader.connection.info.backend_pid])
        enqueue()  # unheard by both

        wait_until(lambda: "look" in other.rests().turn(), "the other to look")
        assert other.sleeps()

    @pytest.mark.parametrize("names", [(), ("default",)], ids=["all queues", "one queue"])
    def test_jobs_that_are_given_back_ring_once(self, worker, names):
        enqueue_jobs(4)
        claims = claim_jobs(4)
        sleeper = worker(*names).fall_asleep()

        Job.objects.release(claims)

        assert sleeper.turn() == ["claim"]
        assert len(sleeper.bell._rings) == 1


class TestLostConnections:
    def test_a_wait_whose_connection_is_lost_is_an_error(self, worker, monkeypatch):
        monkeypatch.setattr(doorbells, "ANSWER_SECONDS", 10_000.0)
        sleeper = worker().rests()
        with in_flight():
            sleeper.turn()
            here("SELECT pg_terminate_backend(%s)", [sleeper.bell._second.info.backend_pid])

            with pytest.raises(psycopg.OperationalError):
                wait_until(lambda: sleeper.rests().turn() and False, "the end of the connection")

    def test_a_lock_that_was_waited_for_is_minded(self, worker):
        sleeper = worker().rests()
        with in_flight():
            sleeper.turn()
        sleeper.turn_until_it_sleeps()

        here("SELECT pg_terminate_backend(%s)", [sleeper.bell._second.info.backend_pid])

        assert sleeper.bell.waits_at
        with pytest.raises(psycopg.OperationalError):
            wait_until(lambda: sleeper.rests().turn() and False, "the end of the connection")

    def test_the_locks_of_a_session_that_only_the_server_still_has_go_with_it(self, worker):
        """As when the network has swallowed a connection: the server might keep it for hours."""
        sleeper = worker().fall_asleep()
        lost = sleeper.connection  # is not closed
        sleeper.bell.close()
        sleeper._session = Session("default", "test listener")

        sleeper.connect()

        assert sleeper.rests().turn() == ["look"]
        assert sleeper.sleeps()
        lost.close()


class TestOption:
    @pytest.mark.parametrize(("notify", "heard"), [("asleep", 0), ("always", 1), ("never", 0)])
    def test_while_nobody_sleeps(self, settings, notify, heard):
        settings.TASKS = {"default": backend(NOTIFY=notify)}
        with second_connection() as listener:
            rings = []
            sql(listener, f"LISTEN {CHANNEL}")
            listener.connection.add_notify_handler(rings.append)

            tasks.add.enqueue(1, 2)
            tasks.add.enqueue_many([[1, 2]] * 3)
            sql(listener, "SELECT 1")  # with whose answer comes what was committed before

        assert len(rings) == 2 * heard

    def test_a_worker_told_never_to_notify_does_not_sleep(self, worker):
        poller = worker(notify="never")

        assert poller.rests().turn() == []
        assert advisory_locks() == 0

    def test_told_never_to_notify_an_enqueue_does_not_even_if_somebody_sleeps(self, settings, worker):
        """Case B46"""
        settings.TASKS = {"default": backend(NOTIFY="never")}
        sleeper = worker().fall_asleep()

        tasks.add.enqueue(1, 2)
        tasks.add.using(job_key="key").enqueue(1, 2)
        tasks.add.enqueue_many([[1, 2]] * 3)

        assert sleeper.turn() == []

    def test_only_a_transaction_that_did_not_notify_can_be_prepared(self, settings, programs):
        """The reason for "never"."""
        with servers(programs, 1) as [server], database_alias("prepared") as first:
            first.settings_dict.update(HOST=str(server.folder), PORT="", NAME="postgres", USER="postgres", PASSWORD="")
            with second_connection("prepared") as sleeper:
                fall_asleep(sleeper)
                for notify, can_prepare in (("asleep", False), ("never", True)):
                    settings.TASKS = {"default": backend(NOTIFY=notify, DATABASE="prepared")}
                    sql(first, "BEGIN")
                    job_id = tasks.add.enqueue(1, 2).id
                    if can_prepare:
                        sql(first, "PREPARE TRANSACTION 'second phase'")
                        sql(first, "COMMIT PREPARED 'second phase'")
                    else:
                        with pytest.raises(DatabaseError, match="LISTEN, UNLISTEN, or NOTIFY"):
                            sql(first, "PREPARE TRANSACTION 'second phase'")
            assert sql(first, "SELECT id FROM django_pgqueue_job") == [(int(job_id),)]


@pytest.mark.direct("behind a pooler nobody sleeps")
class TestProcesses:
    """Real workers, which look by themselves every ten minutes."""

    def start_two(self, start_worker):
        workers = [start_worker("--concurrency", "1", POLL_SECONDS="600").wait_ready() for _ in range(2)]
        wait_until(who_sleeps, "one of them to sleep")
        return workers

    def test_a_worker_with_all_slots_taken_hands_over(self, start_worker):
        workers = self.start_two(start_worker)
        with barrier(71):
            mark_and_wait_for.enqueue("first", 71)
            wait_for_mark("first")

            leave_mark.enqueue("second")
            wait_for_mark("second")
            leave_mark.enqueue("third")
            wait_for_mark("third")

        assert [worker.stop() for worker in workers] == [0, 0]

    def test_when_the_one_that_sleeps_is_killed_another_takes_its_place(self, start_worker):
        workers = self.start_two(start_worker)
        [supervisor] = who_sleeps()
        [killed] = [worker for worker in workers if worker.pid == supervisor]
        [other] = [worker for worker in workers if worker is not killed]

        killed.kill_all()
        leave_mark.enqueue("unheard")

        wait_for_mark("unheard")
        wait_until(lambda: who_sleeps() == [other.pid], "the other to sleep")
        leave_mark.enqueue("heard")
        wait_for_mark("heard")
        assert other.stop() == 0

    def test_a_worker_that_stops_hands_over(self, start_worker):
        workers = self.start_two(start_worker)
        [supervisor] = who_sleeps()
        [first] = [worker for worker in workers if worker.pid == supervisor]
        [second] = [worker for worker in workers if worker is not first]
        with barrier(72) as lock:
            mark_and_wait_for.enqueue("in hand", 72)
            wait_for_mark("in hand")
            first.signal(SIGTERM)  # one of the two has that job

            leave_mark.enqueue("next")
            lock.release()
            wait_for_mark("next")

        assert (first.wait(), second.stop()) == (0, 0)

    def test_a_child_that_is_killed_leaves_no_job_behind(self, start_worker):
        worker = start_worker("--processes", "2", "--concurrency", "1", POLL_SECONDS="600")
        wait_until(lambda: worker.log.count("is ready") == 2, "two children")
        wait_until(who_sleeps, "it to sleep")

        for number in range(4):
            children = wait_until(lambda: worker.children()[1:] and worker.children(), "two children")
            os.kill(children[number % 2], SIGKILL)
            leave_mark.enqueue(f"{number}")
            wait_for_mark(f"{number}")

        assert worker.stop() == 0

    def test_one_of_many_idle_children_looks_for_a_job(self, start_worker):
        """Each job costs few statements, however many children there are."""
        jobs, children = 20, 4
        [(tomorrow,)] = here("SELECT clock_timestamp() + interval '1 day'")
        enqueue(run_after=tomorrow)  # so that each child knows the band, and sends a claim whenever it is woken
        with Proxy.to_database() as proxy:
            worker = start_worker("--processes", f"{children}", DATABASE_URL=proxy.url, POLL_SECONDS="600")
            wait_until(lambda: worker.log.count("is ready") == children, "all children")
            wait_until(who_sleeps, "it to sleep")

            with proxy.recording() as statements:
                for number in range(jobs):
                    wait_for_status(leave_mark.enqueue(f"{number}").id, "done")

            assert worker.stop() == 0
        theirs = [statement for name, statement in statements if name.startswith("pgqueue child")]
        assert sum("SET status = 'done'" in statement for statement in theirs) == jobs
        searches = sum("SET status = 'running'" in each or "WITH RECURSIVE" in each for each in theirs)
        assert jobs <= searches <= 3 * jobs < children * jobs


class TestTogether:
    def test_no_wake_up_is_missed(self, worker, monkeypatch):
        """
        Workers and enqueues at random, in short and long transactions. No worker looks, or tries the locks again,
        unless it is told to: each job is run because someone was rung, or looked when he fell asleep.
        """
        monkeypatch.setattr(doorbells, "WAIT_SECONDS", 0.1)
        monkeypatch.setattr(doorbells, "TRY_AGAIN_SECONDS", 10_000.0)
        seed = random.randrange(2**32)
        producers = [InThread(lambda n=n: produce(random.Random(seed + n))) for n in range(3)]
        over = threading.Event()
        workers = [InThread(lambda n=n: serve(over, random.Random(seed - n - 1))) for n in range(3)]
        try:
            for producer in producers:
                producer.result()
            wait_until(lambda: not Job.objects.filter(status="pending").exists(), f"all jobs, seed {seed}")
        finally:
            over.set()
            for each in workers:
                each.result()

        assert Job.objects.count() > 50


def produce(rng, jobs=40):
    """Enqueue now and then, in transactions that are short or long, and rolled back now and then."""
    for _ in range(jobs):
        time.sleep(rng.expovariate(100))
        with transaction.atomic():
            enqueue()
            time.sleep(rng.choice((0, 0, 0.002, 0.03)))
            transaction.set_rollback(rng.random() < 0.1)


def serve(over, rng):
    """A worker of one slot. It claims when it was told to, and when it has run a job."""
    me = Worker()
    try:
        is_told = True
        while not over.is_set():
            if is_told:
                began = NOW()
                is_told = bool(Job.objects.claim("worker"))
                me.looked(began, has_found=is_told)
                time.sleep(rng.choice((0, 0.001, 0.02)) * is_told)
            is_told = bool(me.turn()) or is_told
            time.sleep(0.001)
    finally:
        me.close()
