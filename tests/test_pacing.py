"""How many jobs a child claims at a time."""

import random

import pytest

from django_pgqueue.worker.pacing import BUFFERED_SECONDS, LARGE_CLAIM, MAX_BUFFERED, MAX_BUFFERED_CHARS, Pacing


def after(slots, seconds, jobs=500):
    """A pacing that has seen *jobs* jobs of so many *seconds* each."""
    pacing = Pacing(slots)
    for _ in range(jobs):
        pacing.finished(seconds)
    return pacing


@pytest.mark.parametrize("slots", [1, 4, 32, 1_000])
def test_a_child_never_holds_more_than_the_capacity_and_never_wants_less_than_nothing(slots):
    dice = random.Random(slots)
    pacing = Pacing(slots)
    held = 0
    for _ in range(5_000):
        wanted = pacing.wanted(held)
        assert wanted >= 0
        held += wanted
        assert held <= Pacing.capacity(slots)
        if wanted:
            pacing.claimed(wanted, wanted * dice.choice([2, 200, 2_000_000]))
        for _ in range(dice.randint(0, held)):
            held -= 1
            pacing.finished(dice.choice([0.0, 1e-9, 0.001, 0.1, 3600.0]))
        if dice.random() < 0.05:
            pacing.stalled()


def test_more_in_hand_than_slots_and_buffer_want_nothing():
    assert [after(4, 0.0).wanted(held) for held in (4 + MAX_BUFFERED, 5 + MAX_BUFFERED, 10_000)] == [0, 0, 0]


def test_before_anything_is_known_a_child_claims_as_many_jobs_as_it_has_slots():
    assert [Pacing(4).wanted(held) for held in range(6)] == [4, 3, 2, 1, 0, 0]


def test_long_jobs_are_never_hoarded():
    assert [after(4, 60.0).wanted(held) for held in (0, 3, 4)] == [4, 1, 0]


def test_short_jobs_come_in_batches_of_what_the_slots_finish_in_a_tenth_of_a_second():
    pacing = after(4, 0.001)

    assert pacing.wanted(0) == pytest.approx(4 * BUFFERED_SECONDS / 0.001, rel=0.05)
    assert after(4, 0.0).wanted(0) == 4 + MAX_BUFFERED


def test_nothing_is_claimed_while_half_of_the_buffer_is_left_unless_it_is_large():
    pacing = after(4, 0.001)
    most = pacing.wanted(0)
    half = (most - 4) // 2

    assert pacing.wanted(4 + half) == 0
    assert pacing.wanted(4 + half - 1) == most - (4 + half - 1)
    assert after(4, 0.0).wanted(4 + MAX_BUFFERED - LARGE_CLAIM) == 0
    assert after(4, 0.0).wanted(4 + MAX_BUFFERED - LARGE_CLAIM - 1) == LARGE_CLAIM + 1


def test_jobs_that_found_no_slot_end_the_buffer():
    pacing = after(4, 0.0)

    pacing.stalled()

    assert [pacing.wanted(held) for held in (0, 4, 100)] == [4, 0, 0]


def test_large_arguments_are_not_hoarded_however_short_their_jobs_are():
    pacing = after(4, 0.0)

    pacing.claimed(4, 4 * 1_000_000)

    assert pacing.wanted(0) == 4 + MAX_BUFFERED_CHARS // 1_000_000


def test_a_slot_never_stands_idle_for_the_size_of_arguments():
    pacing = after(4, 0.0)

    pacing.claimed(1, 100 * MAX_BUFFERED_CHARS)

    assert pacing.wanted(0) == 4


def test_small_arguments_bring_the_buffer_back():
    pacing = after(4, 0.0)
    pacing.claimed(4, 4 * 1_000_000)

    for _ in range(500):
        pacing.claimed(1, 10)

    assert pacing.wanted(0) == 4 + MAX_BUFFERED
