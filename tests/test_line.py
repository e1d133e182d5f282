"""The line of jobs before the slots: nobody waits behind a long job, and nobody is woken in vain."""

import sys
import threading

import pytest

from django_pgqueue.worker.line import Line, new_bell

from .helpers import PATIENCE_SECONDS, wait_until


class CountingBell:
    """It counts how often its slot was called."""

    def __init__(self):
        self.rung = 0
        self._lock = new_bell()

    def acquire(self):
        self._lock.acquire()

    def release(self):
        self.rung += 1
        self._lock.release()


@pytest.fixture
def make_line():
    """Return a line with *count* slots that call what they take."""
    made = []

    def make(count):
        line, came = Line(), []
        line.bells = [CountingBell() for _ in range(count)]

        def work(number):
            bell = line.bells[number]
            while (job := line.take(bell)) is not None:
                came.append(number)
                job()

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(line._asleep) == count, "all slots to sleep")
        made.append((line, threads))
        return line, came

    yield make
    for line, threads in made:
        line.give([None] * len(threads))
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


def test_no_job_waits_behind_one_that_lasts_while_a_slot_is_free(make_line):
    """R12: whatever was given together, and however long the others last."""
    line, _ = make_line(3)
    may_end, ran = threading.Event(), threading.Event()

    line.give([may_end.wait, may_end.wait, ran.set])
    is_beside_them = ran.wait(PATIENCE_SECONDS)
    ran.clear()
    line.give([ran.set])
    is_after_them = ran.wait(PATIENCE_SECONDS)
    may_end.set()

    assert is_beside_them and is_after_them


def test_jobs_that_last_are_run_by_as_many_slots_as_there_are_at_the_same_time(make_line):
    line, came = make_line(8)
    together = threading.Barrier(8)

    line.give([lambda: together.wait(PATIENCE_SECONDS)] * 16)

    wait_until(lambda: len(came) == 16, "all to come")
    assert not together.broken


def test_jobs_that_are_over_at_once_call_one_slot_more_than_they_need_and_not_all(make_line):
    line, came = make_line(8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE_SECONDS)  # so that nobody is interrupted while it runs through them
    try:
        line.give([object] * 1_000)
        wait_until(lambda: len(came) == 1_000, "all to come")
    finally:
        sys.setswitchinterval(interval)

    assert sum(bell.rung for bell in line.bells) == 2


def test_what_nobody_has_taken_is_taken_back_in_order(make_line):
    line = Line()
    line.give([1, 2, 3])

    assert line.take(new_bell()) == 1
    assert line.take_back() == [2, 3]
    assert line.take_back() == []


def test_a_job_given_at_the_moment_at_which_the_last_slot_lies_down_is_run_and_so_is_the_next(make_line):
    line, _ = make_line(1)
    ran = [threading.Event() for _ in range(3)]

    class JustBefore(list):
        """Who gives a job finds nobody asleep, and the slot has seen that there is none."""

        def append(self, bell):
            if not ran[1].is_set():
                line.give([ran[1].set])
            super().append(bell)

    line._asleep = JustBefore(line._asleep)
    line.give([ran[0].set])

    assert ran[1].wait(PATIENCE_SECONDS)
    wait_until(lambda: line._asleep, "the slot to sleep again")
    line.give([ran[2].set])
    assert ran[2].wait(PATIENCE_SECONDS)


def test_no_call_is_lost_whenever_jobs_are_given(make_line, switching_often):
    """Slots lie down, are called and called off at every moment there is."""
    line, _ = make_line(4)
    last = threading.Semaphore(0)

    for number in range(3_000):
        line.give([last.release] * (number % 3 + 1))
        for _ in range(number % 3 + 1):
            assert last.acquire(timeout=PATIENCE_SECONDS), f"job {number} was not run"
