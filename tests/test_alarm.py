"""What ends the sleep of a child's control loop."""

import os
import threading
from contextlib import suppress

import pytest

from django_pgqueue.worker.alarm import LOOK, WAKE, Alarm


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    for descriptor in (reader, writer):
        with suppress(OSError):
            os.close(descriptor)


def sleeping(alarm):
    """Let a thread sleep by *alarm*; the event is set when that is over."""
    is_over = threading.Event()

    def sleep():
        alarm.sleep(60)
        is_over.set()

    threading.Thread(target=sleep, daemon=True).start()
    return is_over


def test_a_ring_that_comes_before_the_sleep_is_not_lost():
    """R31: the loop has decided to sleep, and has not begun to."""
    alarm = Alarm()
    for _ in range(100_000):  # more than a pipe holds
        alarm.ring()

    assert sleeping(alarm).wait(30)


def test_the_supervisor_s_words_are_heard_at_once_and_once(pipe):
    reader, writer = pipe
    alarm = Alarm(reader)
    os.write(writer, WAKE + LOOK)
    alarm.ring()

    assert alarm.sleep(60) == WAKE + LOOK
    os.write(writer, LOOK)
    assert alarm.sleep(60) == LOOK
    assert alarm.sleep(0) == b""


def test_a_supervisor_that_is_dead_does_not_keep_the_loop_awake(pipe):
    """R22: the child has tasks to finish, and would use all of a processor for that."""
    reader, writer = pipe
    alarm = Alarm(reader)
    os.close(writer)
    alarm.sleep(60)
    is_over = sleeping(alarm)

    assert not is_over.wait(0.2)
    alarm.ring()
    assert is_over.wait(30)
