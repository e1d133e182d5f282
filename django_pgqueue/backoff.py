"""
How long a failed job waits before its next attempt.

The default is 15 seconds, times four for each retry already made, at most one hour, and 0 to 20 % on
top so that jobs that failed together do not come back together. A task, or the ``BACKOFF`` option, may
give another rule; whatever that returns ends up between zero and MAX_DELAY_SECONDS.
"""

import random
from collections.abc import Callable
from datetime import timedelta
from inspect import iscoroutinefunction
from typing import Any

FIRST_DELAY_SECONDS = 15.0
GROWTH = 4
LONGEST_DELAY_SECONDS = 3600.0
JITTER = 0.2
MAX_DELAY_SECONDS = 366 * 24 * 3600.0

Delay = float | timedelta | None
Backoff = float | timedelta | Callable[[BaseException, Any], Delay]


def default_delay(attempt: int) -> float:
    """Return the seconds to wait after the failure of counted attempt number *attempt* (1, 2, …)."""
    steps = min(max(attempt - 1, 0), 20)  # enough to pass the cap, too few to overflow
    delay = min(FIRST_DELAY_SECONDS * GROWTH**steps, LONGEST_DELAY_SECONDS)
    return delay * (1 + random.uniform(0, JITTER))


def seconds(delay: float | timedelta) -> float:
    """
    Return *delay* as seconds between 0 and MAX_DELAY_SECONDS.

    Raises ``TypeError`` for anything that is not a number or a ``timedelta``, ``ValueError`` for NaN.
    """
    if isinstance(delay, timedelta):
        delay = delay.total_seconds()
    if isinstance(delay, bool) or not isinstance(delay, int | float):
        raise TypeError(f"A delay must be seconds or a timedelta, not {delay!r}.")
    if delay != delay:
        raise ValueError("A delay must be a number of seconds, not NaN.")
    return float(min(max(delay, 0), MAX_DELAY_SECONDS))


def is_backoff(value: object) -> bool:
    """Whether *value* can serve as a backoff rule: seconds, a ``timedelta`` or a callable that is not async."""
    if callable(value):
        return not iscoroutinefunction(value)
    try:
        seconds(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return not (value < timedelta(0) if isinstance(value, timedelta) else value < 0)  # type: ignore[operator]


def delay_after(rule: Backoff | None, attempt: int, error: BaseException, task_result: Any) -> float | None:
    """
    Return the seconds to wait after *error* ended counted attempt *attempt*; ``None`` means: do not retry.

    *rule* is the task's, or ``None`` for the default. A callable gets *error* and *task_result* and
    answers with seconds, a ``timedelta`` or ``None``; what it raises is raised here.
    Source of the callable's shape: the proposal for retries in Django's Tasks framework.
    """
    if rule is None:
        return default_delay(attempt)
    delay = rule(error, task_result) if callable(rule) else rule
    return None if delay is None else seconds(delay)


def delay_after_loss(constant: float | None, attempt: int) -> float:
    """
    Return the seconds to wait after counted attempt *attempt* was lost with its process: *constant*, or the default.

    A callable rule is not asked, because there is no exception to ask it about.
    """
    return default_delay(attempt) if constant is None else constant


def constant_of(rule: Backoff | None) -> float | None:
    """Return *rule* in seconds if it is the same for every attempt, else ``None``."""
    return None if rule is None or callable(rule) else seconds(rule)
