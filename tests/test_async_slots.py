"""Async tasks in slots: they share one event loop with each other, and the slots with sync tasks."""

import asyncio
import contextvars
import threading

import pytest
from django.db import connection

from django_pgqueue.compat import task_started
from django_pgqueue.outcomes import Failed, Retried, Succeeded
from django_pgqueue.worker.held import HeldJob

from .app import tasks
from .app.models import Mark
from .helpers import PATIENCE_SECONDS, claim_one, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

local = contextvars.ContextVar("local", default="nobody's")


def held_job(slots, action, task=tasks.act_async):
    name = f"act {id(action)}"
    tasks.ACTS[name] = action
    task.enqueue(name)
    job = claim_one()
    return HeldJob(job, job.claim, (), slots.holdings.add(job.claim), lease_ends=float("inf"))


def give(slots, *actions, task=tasks.act_async):
    """Give jobs that do *actions*, at once."""
    given = [held_job(slots, action, task) for action in actions]
    slots.give(given)
    return given


def outcomes_of(given):
    wait_until(lambda: all(held.attempted for held in given), "all to end")
    return [held.attempted.outcome for held in given]


def test_async_and_sync_jobs_together_are_never_more_than_there_are_slots(make_slots):
    slots = make_slots(3)
    lock, running, most = threading.Lock(), set(), [0]

    def enter(name):
        with lock:
            running.add(name)
            most[0] = max(most[0], len(running))

    def sync(name):
        def action():
            enter(name)
            threading.Event().wait(0.005)
            running.discard(name)

        return action

    def asynchronous(name):
        async def action():
            enter(name)
            await asyncio.sleep(0.005)
            running.discard(name)

        return action

    mixed = []
    for number in range(30):
        is_sync = number % 5 == 0
        make, task = (sync, tasks.act) if is_sync else (asynchronous, tasks.act_async)
        mixed.append(held_job(slots, make(number), task))
    slots.give(mixed)

    assert [type(outcome) for outcome in outcomes_of(mixed)] == [Succeeded] * 30
    assert most[0] == 3


def test_async_jobs_run_beside_each_other_in_all_slots_and_in_one_thread(make_slots):
    slots = make_slots(4)
    threads, together = set(), []

    async def meet():
        threads.add(threading.current_thread().name)
        together.append(1)
        while len(together) < 4:
            await asyncio.sleep(0.001)

    assert [type(outcome) for outcome in outcomes_of(give(slots, *[meet] * 4))] == [Succeeded] * 4
    assert threads == {"pgqueue-async"}


def test_a_sync_job_does_not_wait_behind_async_ones_that_last_while_a_slot_is_free(make_slots):
    slots = make_slots(2)
    may_end, ran = asyncio.Event(), threading.Event()
    [long] = give(slots, may_end.wait)
    wait_until(lambda: long.code is not None, "the async task to run")

    for _ in range(3):
        ran.clear()
        give(slots, ran.set, task=tasks.act)
        assert ran.wait(PATIENCE_SECONDS)

    slots.event_loop.loop().call_soon_threadsafe(may_end.set)
    assert outcomes_of([long]) == [Succeeded(long.claim, "true")]


def test_nothing_of_an_async_jobs_context_reaches_the_next_one(make_slots):
    slots = make_slots(1)
    seen = []

    async def look_and_set():
        seen.append(local.get())
        local.set("the last one's")

    outcomes_of(give(slots, *[look_and_set] * 5))

    assert seen == ["nobody's"] * 5


@pytest.mark.parametrize(
    ("error", "ending"), [(ValueError("no"), Retried), (SystemExit(1), Retried), (asyncio.CancelledError(), Retried)]
)
def test_an_async_job_that_fails_ends_as_others_do_and_the_loop_goes_on(make_slots, error, ending):
    slots = make_slots(1)

    async def fail():
        raise error

    async def work():
        return 1

    outcomes = outcomes_of(give(slots, work, fail, work))

    assert [type(outcome) for outcome in outcomes] == [Succeeded, ending, Succeeded]


def test_an_async_result_that_cannot_be_stored_fails_the_job(make_slots):
    async def work():
        return {1}

    [outcome] = outcomes_of(give(make_slots(1), work))

    assert isinstance(outcome, Failed) and "set" in outcome.error.message


def test_synchronous_parts_have_a_thread_and_connections_of_their_own_and_leave_none_open(make_slots):
    slots = make_slots(1)

    async def work():
        await Mark.objects.acreate(note="async")
        return threading.active_count()

    before = threading.active_count()
    given = give(slots, *[work] * 3)

    assert [type(outcome) for outcome in outcomes_of(given)] == [Succeeded] * 3
    assert Mark.objects.filter(note="async").count() == 3
    wait_until(lambda: count_backends() == 0, "their connections to be closed")
    wait_until(lambda: threading.active_count() <= before + 1, "their threads to end")


def count_backends():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return cursor.fetchone()[0]


def test_receivers_of_a_start_may_use_the_database(make_slots):
    """They are synchronous, and would not be allowed to in the event loop."""
    slots = make_slots(1)

    def note(**signal):
        Mark.objects.create(note=f"started {signal['task_result'].id}")

    async def work():
        return 1

    outcomes_of(give(slots, work))
    task_started.connect(note)
    try:
        [held] = give(slots, work)
        outcomes_of([held])
    finally:
        task_started.disconnect(note)

    assert list(Mark.objects.values_list("note", flat=True)) == [f"started {held.job.id}"]
    wait_until(lambda: count_backends() == 0)


def test_a_backoff_of_an_async_task_may_use_the_database(make_slots, monkeypatch):
    slots = make_slots(1)
    slots.backoff = lambda error, task_result: 40 + Mark.objects.count()

    async def fail():
        raise ValueError

    [first, second] = outcomes_of(give(slots, fail, fail))

    assert (first.delay_seconds, second.delay_seconds) == (40, 40)
    wait_until(lambda: count_backends() == 0)
