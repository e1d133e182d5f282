"""Where a child is watched and replaced: what its supervisor makes of its end."""

import logging

import pytest

from django_pgqueue.outcomes import Claim
from django_pgqueue.worker import place as place_module
from django_pgqueue.worker.child import EXIT_RECYCLE
from django_pgqueue.worker.holdings import Held, Vitals
from django_pgqueue.worker.place import Place
from django_pgqueue.worker.process import Said
from django_pgqueue.worker.vigil import Verdict

from .helpers import worker_config as config


class FakeChild:
    """A child that ends when the test says so."""

    application_name = "child"
    voice = -1

    def __init__(self, config):
        self.pid = self.owner = f"child {id(self)}"
        self.was_told_to_stop = False
        self.was_killed = False
        self.code = None
        self.holds = []

    def said(self):
        return Said(has_started=True)

    def exit_code(self):
        return self.code

    def vitals(self):
        return Vitals(0.0, 0.0, 0.0, 0.0)

    def held(self):
        return self.holds

    def is_stopped(self):
        return False

    def stop(self, grace):
        self.was_told_to_stop = True

    def kill(self):
        self.was_killed = True

    def wait(self, seconds):
        return self.code

    def forget(self):
        pass


@pytest.fixture
def make_place(monkeypatch):
    monkeypatch.setattr(place_module, "ChildProcess", FakeChild)

    def make(**changes):
        deaths = []
        place = Place(config(**changes), deaths.append)
        place.deaths = deaths
        place.look()
        return place

    return make


def give_verdict(place, *, can_hear=True, blames_tasks=False):
    """Let the vigil find that the child hangs, and the place act upon it."""
    place._vigil.look = lambda *args, **options: Verdict("it hangs", can_hear, blames_tasks)
    place.look()


HELD = [Held(Claim(1, 1), True)]


@pytest.mark.parametrize("held", [[], HELD], ids=["all ended", "one goes on"])
def test_a_child_that_was_replaced_does_not_end_a_burst(make_place, held):
    """It was told to stop, and has left jobs to others."""
    place = make_place(burst=True)
    first = place.child
    give_verdict(place)
    assert first.was_told_to_stop

    first.holds, first.code = held, 0
    place.look()

    assert not place.is_over
    assert place.child not in (None, first)


def test_a_burst_is_over_when_a_child_has_nothing_left(make_place):
    place = make_place(burst=True)

    place.child.code = 0
    place.look()

    assert place.is_over


def test_a_stop_during_a_replacement_starts_no_other_child(make_place):
    place = make_place()
    first = place.child
    give_verdict(place)

    place.stop(5.0)
    first.code = 0
    place.look()

    assert place.is_over
    assert len(place.deaths) == 1


def test_a_second_signal_during_a_replacement_kills_and_reports_once(make_place):
    place = make_place()
    first = place.child
    give_verdict(place)
    place.stop(5.0)

    first.code = -9
    place.kill()
    place.look()

    assert place.is_over and first.was_killed
    assert [death.is_ours for death in place.deaths] == [True]


def test_a_child_that_does_not_end_in_its_time_is_killed(make_place, monkeypatch):
    place = make_place(grace=0.0)
    give_verdict(place)
    assert not place.child.was_killed

    monkeypatch.setattr(place_module.time, "monotonic", lambda: place._kill_at + 1)
    place.look()

    assert place.child.was_killed


@pytest.mark.parametrize(("blames_tasks", "is_ours"), [(True, False), (False, True)])
def test_tasks_are_blamed_for_a_child_that_gave_no_sign_of_life_only(make_place, blames_tasks, is_ours):
    place = make_place()
    first = place.child
    give_verdict(place, can_hear=False, blames_tasks=blames_tasks)
    assert first.was_killed

    first.holds, first.code = HELD, -9
    place.look()

    [death] = place.deaths
    assert (death.is_ours, death.cause, death.held) == (is_ours, "it hangs", HELD)


def test_a_recycled_child_is_replaced_at_once_and_one_that_died_after_a_pause(make_place, caplog):
    caplog.set_level(logging.INFO, "django_pgqueue")
    place = make_place()
    first = place.child

    first.code = EXIT_RECYCLE
    place.look()
    second = place.child
    assert second not in (None, first)
    second.code = EXIT_RECYCLE
    second.holds = HELD  # a task has ended the process with this code
    place.look()

    assert place.child is None and place.restart_at > 0
    assert "died (exit code 10)" in caplog.text
