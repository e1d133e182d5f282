from datetime import timedelta

import pytest

from django_pgqueue.backoff import (
    JITTER,
    LONGEST_DELAY_SECONDS,
    MAX_DELAY_SECONDS,
    default_delay,
    delay_after,
    is_backoff,
    seconds,
)


@pytest.mark.parametrize(("attempt", "shortest"), [(1, 15), (2, 60), (3, 240), (4, 960), (5, 3600), (6, 3600)])
def test_the_default_wait_is_15_seconds_times_four_for_each_retry_up_to_an_hour(attempt, shortest):
    """R23"""
    delays = [default_delay(attempt) for _ in range(200)]

    assert min(delays) >= shortest
    assert max(delays) <= shortest * (1 + JITTER)


def test_no_default_wait_is_negative_or_beyond_the_cap_whatever_the_attempt():
    """R23"""
    attempts = [*range(-2, 71), 1_000, 2**31, 2**63, 10**400]

    delays = [default_delay(attempt) for attempt in attempts for _ in range(140)]

    assert all(15 <= delay <= LONGEST_DELAY_SECONDS * (1 + JITTER) for delay in delays)


def test_jobs_that_failed_together_do_not_come_back_together():
    """R23"""
    delays = {round(default_delay(6)) for _ in range(100)}

    assert len(delays) >= 50


@pytest.mark.parametrize(
    ("delay", "waits"),
    [
        (0, 0.0),
        (1.5, 1.5),
        (timedelta(minutes=2), 120.0),
        (-1, 0.0),
        (-0.0, 0.0),
        (float("-inf"), 0.0),
        (timedelta.min, 0.0),
        (float("inf"), MAX_DELAY_SECONDS),
        (1e300, MAX_DELAY_SECONDS),
        (10**400, MAX_DELAY_SECONDS),
        (-(10**400), 0.0),
        (timedelta.max, MAX_DELAY_SECONDS),
    ],
    ids=lambda value: f"{value!r:.12}",
)
def test_a_delay_ends_up_between_zero_and_a_leap_year(delay, waits):
    assert seconds(delay) == waits
    assert isinstance(seconds(delay), float)


@pytest.mark.parametrize("delay", ["15", None, True, b"1", [1], object(), 1j], ids=repr)
def test_what_is_no_duration_is_refused_as_a_delay(delay):
    with pytest.raises(TypeError, match="must be seconds or a timedelta"):
        seconds(delay)


def test_nan_is_refused_as_a_delay():
    with pytest.raises(ValueError, match="not NaN"):
        seconds(float("nan"))


@pytest.mark.parametrize("rule", [0, 3, 2.5, timedelta(0), timedelta(hours=1), default_delay])
def test_a_backoff_rule_is_seconds_a_timedelta_or_a_callable(rule):
    assert is_backoff(rule)


async def _asynchronous_rule(error, task_result):
    return 1


@pytest.mark.parametrize(
    "rule", ["15", -1, -0.5, timedelta(seconds=-1), float("nan"), True, None, [], 1j, _asynchronous_rule], ids=repr
)
def test_anything_else_is_no_backoff_rule(rule):
    assert not is_backoff(rule)


def test_without_a_rule_the_default_applies():
    delay = delay_after(None, 2, ValueError(), None)

    assert 60 <= delay <= 72


def test_a_rule_that_is_a_duration_is_the_same_for_every_attempt():
    assert [delay_after(7, attempt, ValueError(), None) for attempt in (1, 9)] == [7.0, 7.0]
    assert delay_after(timedelta(minutes=1), 1, ValueError(), None) == 60.0


def test_a_callable_rule_gets_the_error_and_the_task_result():
    seen = []
    error = ValueError("no")

    delay = delay_after(lambda *given: seen.append(given) or timedelta(seconds=9), 1, error, "the result")

    assert delay == 9.0
    assert seen == [(error, "the result")]


def test_a_callable_rule_that_answers_none_says_do_not_retry():
    assert delay_after(lambda error, task_result: None, 1, ValueError(), None) is None


def test_what_a_callable_rule_raises_is_raised():
    def broken(error, task_result):
        raise LookupError("no such error")

    with pytest.raises(LookupError):
        delay_after(broken, 1, ValueError(), None)
