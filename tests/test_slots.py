"""Slots: the threads that run jobs outlive whatever a task does, and whatever is done to it."""

import gc
import random
import sys
import threading

import pytest
from django.db import connection, connections, transaction

from django_pgqueue.exceptions import Interruption, TaskTimeout
from django_pgqueue.outcomes import Retried, Succeeded
from django_pgqueue.worker.attempt import Attempted, Begun
from django_pgqueue.worker.held import HeldJob
from django_pgqueue.worker.interrupter import Interrupter

from .app import tasks
from .app.models import Mark
from .helpers import claim_one, wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # An interruption may arrive in a destructor, or in a callback of the garbage collector, and is lost there.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def give(slots, action, task=tasks.act):
    """Hand a job that does *action* to a slot."""
    name = f"act {random.random()}"
    tasks.ACTS[name] = action
    task.enqueue(name)
    job = claim_one()
    held = HeldJob(job, job.claim, (), slots.holdings.add(job.claim), lease_ends=float("inf"))
    slots.give([held])
    return held


def ended(held):
    wait_until(lambda: held.attempted is not None, "the attempt to end")
    return held.attempted


def slot_threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("pgqueue-slot")}


def count_backends():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return cursor.fetchone()[0]


def spin():
    while True:
        pass


def query_for_ever():
    with transaction.atomic():
        Mark.objects.create(note="interrupted")
        while True:
            Mark.objects.count()


@pytest.mark.filterwarnings("ignore:connection .* was deleted while still open:ResourceWarning")
def test_150_interruptions_in_the_middle_of_queries_cost_no_slot_and_no_connection(make_slots, monkeypatch):
    """
    No thread is lost, no connection is left in the middle of a command, and none stays open: the next job in
    the slot always finds everything as it should be.
    """
    # One may arrive in a connection's destructor. The interpreter reports it and forgets it; pytest would keep it,
    # with the connection in its traceback.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    slots = make_slots(2)
    interrupted = 0
    for number in range(150):
        held = give(slots, query_for_ever)
        wait_until(lambda held=held: held.code is not None, "the task to run")
        threading.Event().wait(random.random() * 0.02)  # any moment will do
        while held.attempted is None:
            held.code.interrupt(TaskTimeout)
            threading.Event().wait(0.05)
            if held.code._sent == 2 and held.attempted is None:
                held.code._sent = 1  # a destructor swallowed it; the product would replace the process
        attempted = ended(held)
        assert isinstance(attempted.outcome, Retried) and attempted.outcome.ending == "timeout", attempted
        interrupted += 1
        if number % 10 == 0:
            probes = [give(slots, lambda: Mark.objects.filter(note="interrupted").count() * 0) for _ in range(2)]
            assert [ended(probe).outcome for probe in probes] == [Succeeded(probe.claim, "0") for probe in probes]

    assert interrupted == 150
    wait_until(lambda: slot_threads() == {"pgqueue-slot-1", "pgqueue-slot-2"}, "both slots to be there")
    del held, attempted, probes
    slots.finished.clear()
    gc.collect()  # one that was interrupted while it connected has no owner who could close it
    wait_until(lambda: count_backends() == 0, "no connection to be left")
    assert not Mark.objects.exists(), "each was in a transaction"


def test_a_thread_whose_task_was_interrupted_runs_no_other(make_slots):
    slots = make_slots(1)
    before = threads_by_ident(slots)
    held = give(slots, query_for_ever)
    wait_until(lambda: held.code is not None, "the task to run")
    while held.attempted is None:
        held.code.interrupt(TaskTimeout)
        threading.Event().wait(0.05)

    after = ended(give(slots, threading.get_ident)).outcome

    assert after.result not in before


def test_where_no_thread_can_be_started_that_of_an_interrupted_task_goes_on(make_slots, monkeypatch):
    """Else the slot were gone, and the job would be held for ever."""
    slots = make_slots(1)
    held = give(slots, spin)
    wait_until(lambda: held.code is not None, "the task to run")

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        while held.attempted is None:
            held.code.interrupt(TaskTimeout)
            threading.Event().wait(0.05)
        wait_until(lambda: slots.finished, "the job to be settled")

    assert ended(give(slots, lambda: 5)).outcome.result == "5"


def threads_by_ident(slots):
    return {str(thread.ident) for thread in slots._threads.values()}


def test_a_lost_job_that_has_not_begun_is_not_run(make_slots):
    slots = make_slots(1)
    is_running, may_end = threading.Event(), threading.Event()

    def wait():
        is_running.set()
        may_end.wait()

    first = give(slots, wait)
    is_running.wait()
    ran = []
    second = give(slots, lambda: ran.append(1))
    second.lost_for = Interruption
    may_end.set()

    ended(first), ended(second)

    assert ran == []


def test_what_a_job_was_made_of_is_freed_when_it_has_ended_without_the_garbage_collector(make_slots):
    """Among many short jobs its work would be half of the process's."""
    slots = make_slots(1)
    gc.collect()
    gc.disable()
    try:
        ids = [give(slots, None, task=tasks.send_receipt).job.id, give(slots, lambda: 1).job.id]
        wait_until(lambda: len(slots.finished) == 2, "both to be handed back")
        slots.finished.clear()
        wait_until(lambda: len(slots._line._asleep) == 1, "the slot to have let go of it")
        things = [thing for thing in gc.get_objects() if isinstance(thing, HeldJob | Attempted | Begun)]
        left = [type(thing) for thing in things if thing.job.id in ids]
    finally:
        gc.enable()

    assert left == []


def test_a_task_that_has_ended_does_not_run_while_it_waits_to_be_settled(make_slots):
    """The database may be away for long; nobody must think that the task goes on, and replace its process."""
    slots = make_slots(1)

    held = give(slots, None, task=tasks.send_receipt)
    wait_until(lambda: slots.finished, "the attempt to end")

    [entry] = slots.holdings.read()
    assert (entry.started, entry.finished) == (False, True)
    assert held.deadline == float("inf")


def test_the_interrupter_sleeps_until_there_is_something_to_do(make_slots):
    slots = make_slots(1)
    interrupter = Interrupter(slots.running)
    may_end = threading.Event()
    held = give(slots, may_end.wait)
    wait_until(lambda: held.code is not None, "the task to run")

    assert interrupter._look() is None
    held.deadline = 0.0
    assert 0 < interrupter._look() <= 5.0, "it looks again whether the task has ended"
    assert held.code.reason is TaskTimeout

    may_end.set()
    ended(held)
    assert interrupter._look() is None


def test_the_interrupter_rests_while_a_task_past_its_deadline_settles_or_has_not_been_called(make_slots):
    slots = make_slots(1)
    interrupter = Interrupter(slots.running)
    may_end = threading.Event()
    held = give(slots, may_end.wait)
    wait_until(lambda: held.code is not None, "the task to run")
    held.deadline = 0.0

    held.is_settling = True
    while_it_settles = interrupter._look()
    held.is_settling = False
    held.code, code = None, held.code
    before_it_is_called = interrupter._look()

    held.code = code
    may_end.set()
    ended(held)
    assert while_it_settles is None
    assert before_it_is_called > 0


def test_connections_belong_to_the_thread_that_opened_them(make_slots):
    """The interrupter reads them from outside; nothing else does."""
    slots = make_slots(1)

    attempted = ended(give(slots, lambda: connections["default"]._thread_ident == threading.get_ident()))

    assert attempted.outcome.result == "true"
