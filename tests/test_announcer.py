"""What is said of attempts that have ended, and by receivers that misbehave."""

import threading

import pytest
from django.utils import translation

from django_pgqueue.worker import announcer
from django_pgqueue.worker.announcer import Announcer

from .helpers import PATIENCE_SECONDS


@pytest.fixture
def running(monkeypatch):
    """Return a started announcer that says what it is given by calling it."""
    monkeypatch.setattr(announcer, "_announce", lambda attempted, written: attempted())
    started = Announcer()
    started.start()
    yield started
    started.finish()
    assert started.has_ended(PATIENCE_SECONDS)


class _Attempted:
    class job:
        id = 1

    def __init__(self, receiver):
        self._receiver = receiver

    def __call__(self):
        self._receiver()


def tell(running, receiver):
    """Have *receiver* called, and return once it was."""
    called = threading.Event()

    def call():
        try:
            receiver()
        finally:
            called.set()

    running.announce([(_Attempted(call), None)])
    assert called.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_receiver_that_raises_whatever_it_is_does_not_silence_those_after_it(running, error):
    def broken():
        raise error

    heard = []
    tell(running, broken)
    tell(running, lambda: heard.append("still here"))

    assert heard == ["still here"]


def test_a_language_that_a_receiver_activates_does_not_reach_the_next_one(running):
    languages = []
    tell(running, lambda: translation.activate("de"))
    tell(running, lambda: languages.append(translation.get_language()))

    assert languages == ["en-us"]


def test_an_announcer_says_when_it_is_far_behind(running, monkeypatch):
    monkeypatch.setattr(announcer, "FAR_BEHIND", 3)
    may_go_on = threading.Event()
    tell(running, lambda: None)
    assert not running.is_far_behind

    for _ in range(4):
        running.announce([(_Attempted(may_go_on.wait), None)])

    assert running.is_far_behind
    may_go_on.set()
