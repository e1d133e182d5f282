"""Raising an exception in a running task: only ever in its own code, whatever the moment."""

import asyncio
import cProfile
import threading
import time
from collections import Counter
from queue import SimpleQueue

import pytest
from django.db import connection, connections

from django_pgqueue.exceptions import Interruption, TaskCancelled, TaskTimeout
from django_pgqueue.worker.interruption import SENDS, AsyncCode, SyncCode

from .helpers import PATIENCE_SECONDS, wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # An interruption may arrive in a destructor, or in a callback of the garbage collector, and is lost there.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Running:
    """User code in a thread of its own. *ended* is what `run` came to, *after* what arrived behind it."""

    def __init__(self, function):
        self.ended = None
        self.after = None
        self.code = None
        self.is_ready = threading.Event()
        self._function = function
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        self.is_ready.wait()

    def _work(self):
        self.code = SyncCode()
        self.is_ready.set()
        try:
            try:
                self.ended = self.code.run(self._function)
            except BaseException as error:
                self.ended = error
            for _ in range(2_000):  # whatever was still under way would arrive here
                pass
        except BaseException as error:
            self.after = error
        finally:
            connections.close_all()

    def result(self):
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()
        assert self.after is None
        return self.ended


def spin_until(event):
    while not event.is_set():
        pass


def test_a_function_returns_its_value_and_raises_its_error():
    error = ValueError("no")

    def fail():
        raise error

    assert Running(lambda: 42).result() == 42
    assert Running(lambda: None).result() is None
    assert Running(fail).result() is error


def test_a_running_function_gets_the_exception_and_may_clean_up():
    is_inside, cleaned = threading.Event(), []

    def spin():
        try:
            is_inside.set()
            while True:
                pass
        finally:
            cleaned.append("up")

    running = Running(spin)
    is_inside.wait()
    running.code.interrupt(TaskTimeout)

    assert type(running.result()) is TaskTimeout
    assert cleaned == ["up"]


def test_an_interruption_is_no_error_of_the_tasks_own():
    is_inside = threading.Event()

    def catch_errors():
        is_inside.set()
        try:
            while True:
                pass
        except Exception:
            return "caught"

    running = Running(catch_errors)
    is_inside.wait()
    running.code.interrupt(TaskCancelled)

    assert type(running.result()) is TaskCancelled


def test_a_function_that_swallows_one_gets_another_and_then_no_more():
    is_inside, may_end = threading.Event(), threading.Event()
    seen = []

    def swallow():
        while len(seen) < SENDS:
            try:
                is_inside.set()
                spin_until(may_end)
            except Interruption as interruption:
                seen.append(type(interruption))
                is_inside.clear()
        return "done all the same"

    running = Running(swallow)
    for count in range(1, SENDS + 1):
        is_inside.wait()
        running.code.interrupt(TaskTimeout if count == 1 else TaskCancelled)
        wait_until(lambda count=count: len(seen) == count)
    running.code.interrupt(TaskCancelled)

    assert running.result() == "done all the same"
    assert seen == [TaskTimeout] * SENDS, "the reason is the first"


def test_who_has_returned_is_not_interrupted():
    running = Running(lambda: "value")
    running.thread.join()

    running.code.interrupt(TaskTimeout)

    assert running.result() == "value"
    assert running.code.reason is None


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_task_may_be_profiled_after_another(is_interrupted):
    """Python 3.11 would not go on in a process where an interruption was taken back as its manual says."""
    is_inside = threading.Event()

    def spin():
        is_inside.set()
        while is_interrupted:
            pass

    running = Running(spin)
    is_inside.wait()
    if is_interrupted:
        running.code.interrupt(TaskTimeout)
    running.result()

    def profile():
        with cProfile.Profile() as profile:
            len(str(threading.current_thread()))
        return bool(profile.getstats())

    assert Running(profile).result() is True


def test_a_statement_in_progress_is_cancelled():
    is_connected = threading.Event()

    def wait_for_the_server():
        try:
            with connection.cursor() as cursor:
                is_connected.set()
                cursor.execute("SELECT pg_sleep(600)")
        finally:
            connection.close()

    running = Running(wait_for_the_server)
    is_connected.wait()
    wait_until(lambda: count_sleepers() == 1)
    running.code.interrupt(TaskTimeout)

    ended = running.result()
    assert isinstance(ended, TaskTimeout) or "canceling statement" in str(ended)
    wait_until(lambda: count_sleepers() == 0)


def test_a_function_that_returns_while_its_statement_is_being_cancelled_is_left_alone():
    """That takes a connection to the database, and the function does not wait for it."""
    is_ready, may_return, has_returned, was_interrupted = (threading.Event() for _ in range(4))
    codes, arrived = [], []

    class Wrapper:
        vendor = "postgresql"

        @property
        def connection(self):
            may_return.set()
            has_returned.wait()

    def work():
        codes.append(SyncCode())
        codes[0]._wrappers = [Wrapper()]
        is_ready.set()
        codes[0].run(may_return.wait)
        has_returned.set()
        try:
            was_interrupted.wait()
            for _ in range(1_000):
                pass
        except BaseException as error:
            arrived.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    is_ready.wait()
    while not codes[0]._is_inside:
        pass
    codes[0].interrupt(TaskTimeout)
    was_interrupted.set()
    thread.join()

    assert arrived == []


def count_sleepers():
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'")
        return cursor.fetchone()[0]


def test_of_2000_interruptions_at_any_moment_none_arrives_after_user_code(switching_often):
    """
    Functions that end by themselves at about the moment at which they are interrupted: each has either
    returned or was interrupted, and nothing comes behind: not in the thread's next code, and not in its own.
    """
    rounds = 2_000
    codes: SimpleQueue[tuple[SyncCode, float]] = SimpleQueue()
    met = Counter()
    came_behind = []

    def work():
        for number in range(rounds):
            try:
                code = SyncCode()
                ends_at = time.monotonic() + 0.0005
                ended = end_at(code, ends_at, codes)
                for _ in range(200):
                    pass
                met["interrupted" if ended is TaskTimeout else "returned, though asked" if code.reason else ended] += 1
            except BaseException as error:
                came_behind.append((number, error))
        codes.put(None)

    thread = threading.Thread(target=work)
    thread.start()
    number = 0
    while (given := codes.get()) is not None:
        code, ends_at = given
        number += 1
        moment = ends_at + (number % 41 - 20) * 0.00001
        while time.monotonic() < moment:
            pass
        code.interrupt(TaskTimeout)
    thread.join()

    assert came_behind == []
    assert met.total() == rounds
    assert met["interrupted"] > rounds / 20 and met["returned"] > rounds / 20, f"the moments were not met: {met}"


def end_at(code, ends_at, codes):
    def spin():
        codes.put((code, ends_at))
        total = 0
        while time.monotonic() < ends_at:
            total += len(str(total))
        return "returned"

    try:
        return code.run(spin)
    except TaskTimeout:
        return TaskTimeout


def test_a_coroutine_is_cancelled_and_one_that_has_ended_is_not():
    async def scenario():
        code = AsyncCode(asyncio.get_running_loop())
        is_inside = asyncio.Event()

        async def sleep():
            is_inside.set()
            await asyncio.sleep(600)

        async def attempt():
            try:
                await code.run(sleep())
            except TaskTimeout as timeout:
                return type(timeout.__cause__)

        running = asyncio.create_task(attempt())
        await is_inside.wait()
        await asyncio.to_thread(code.interrupt, TaskTimeout)
        assert await running is asyncio.CancelledError

        over = AsyncCode(asyncio.get_running_loop())
        assert await over.run(asyncio.sleep(0, "value")) == "value"
        await asyncio.to_thread(over.interrupt, TaskTimeout)
        await asyncio.sleep(0)
        assert over.reason is None

    asyncio.run(scenario())


def test_a_thread_waiting_in_c_code_hears_of_it_when_it_is_back():
    is_inside = threading.Event()

    def sleep():
        is_inside.set()
        time.sleep(0.2)
        while True:
            pass

    running = Running(sleep)
    is_inside.wait()
    running.code.interrupt(TaskTimeout)

    assert type(running.result()) is TaskTimeout
