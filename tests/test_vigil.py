"""What a silent child is taken for. HEART."""

import pytest

from django_pgqueue.outcomes import Claim
from django_pgqueue.worker import vigil
from django_pgqueue.worker.holdings import Held, Vitals
from django_pgqueue.worker.vigil import UNRESPONSIVE_SECONDS, WEDGED_SECONDS, Vigil

GRACE = 25.0


class Watched:
    """A child whose vital signs are set by hand, looked at once a second."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.held = []
        self.is_stopped = False
        self.loops = self.breathes = True
        self._looped = self._breathed = self.now
        monkeypatch.setattr(vigil.time, "monotonic", lambda: self.now)
        self._vigil = Vigil(GRACE)

    def pass_seconds(self, seconds, step=1.0):
        """Return the first verdict, and after how many seconds."""
        for passed in range(1, int(seconds / step) + 1):
            self.now += step
            self._looped = self.now if self.loops else self._looped
            self._breathed = self.now if self.breathes else self._breathed
            vitals = Vitals(looped=self._looped, worked=0.0, breathed=self._breathed, leased=0.0)
            if verdict := self._vigil.look(vitals, self.held, is_stopped=self.is_stopped):
                return verdict, passed * step
        return None


@pytest.fixture
def child(monkeypatch):
    return Watched(monkeypatch)


def holding(deadline, job_id=1, started=True):
    return Held(Claim(job_id, 1), started, deadline)


def test_a_healthy_child_is_left_alone_however_long_its_tasks_run(child):
    child.held = [holding(0.0)]

    assert child.pass_seconds(100_000) is None


def test_a_loop_that_does_not_turn_while_the_child_breathes_is_wedged(child):
    child.loops = False

    verdict, after = child.pass_seconds(1000)

    assert WEDGED_SECONDS < after <= WEDGED_SECONDS + 2
    assert not verdict.can_hear and not verdict.blames_tasks


def test_a_child_that_does_not_breathe_works_hard_and_has_a_long_time(child):
    child.loops = child.breathes = False

    verdict, after = child.pass_seconds(10_000)

    assert UNRESPONSIVE_SECONDS < after <= UNRESPONSIVE_SECONDS + 2
    assert not verdict.can_hear and verdict.blames_tasks


def test_a_child_that_breathes_now_and_then_is_never_unresponsive(child):
    child.loops = child.breathes = False
    for _ in range(10):
        assert child.pass_seconds(UNRESPONSIVE_SECONDS - 10) is None
        child.loops = child.breathes = True
        assert child.pass_seconds(1) is None
        child.loops = child.breathes = False


def test_a_task_over_its_deadline_has_the_grace_period_and_the_child_hears_of_it(child):
    child.held = [holding(child.now + 10)]

    verdict, after = child.pass_seconds(1000)

    assert 10 + GRACE < after <= 10 + GRACE + 2
    assert verdict.can_hear
    assert "job 1" in verdict.why


def test_the_grace_period_begins_at_the_deadline_and_not_at_the_look_before_it(child):
    """Else the child, which counts for itself, would wait for the task a second time."""
    child.held = [holding(child.now + 10)]

    _, after = child.pass_seconds(1000, step=1.001)

    assert 10 + GRACE < after <= 10 + GRACE + 2


def test_a_child_that_neither_breathes_nor_ends_its_task_in_time_cannot_hear(child):
    child.held = [holding(child.now + 10)]
    child.loops = child.breathes = False

    verdict, after = child.pass_seconds(1000)

    assert 10 + GRACE < after <= 10 + GRACE + 2
    assert not verdict.can_hear


def test_tasks_that_end_in_their_grace_period_are_not_added_up(child):
    for job_id in range(100):
        child.held = [holding(child.now - 1, job_id)]
        assert child.pass_seconds(GRACE - 5) is None


def test_a_deadline_of_a_job_that_has_not_started_is_none(child):
    child.held = [holding(child.now - 1, started=False)]

    assert child.pass_seconds(1000) is None


def test_a_stopped_child_is_left_alone(child):
    child.held = [holding(child.now + 1)]
    child.loops = child.breathes = False
    child.is_stopped = True

    assert child.pass_seconds(10_000) is None


def test_a_child_that_was_asleep_with_everybody_has_kept_no_one_waiting(child):
    """A suspended machine, a frozen container: hours pass between two looks, and it has not yet got a turn."""
    child.held = [holding(child.now + 1)]
    child.pass_seconds(1)
    child.loops = child.breathes = False

    assert child.pass_seconds(36_000, step=36_000) is None
    assert child.pass_seconds(5) is None
    child.loops = child.breathes = True
    child.held = []
    assert child.pass_seconds(1000) is None


def test_a_child_that_has_not_begun_is_not_judged(child):
    """Importing a large project takes as long as it takes."""
    nothing = Vitals(0.0, 0.0, 0.0, 0.0)
    for _ in range(1000):
        child.now += 1
        assert child._vigil.look(nothing, [], is_stopped=False) is None
