"""How long a worker's claim takes, without keeping what it claims. With this project's own code."""

import time
from collections.abc import Iterable
from contextlib import suppress
from statistics import median

from django_pgqueue.statements.claim import claim, due, sweep
from django_pgqueue.worker.connection import Session


class _NotForGood(Exception):
    """Rolls a round back."""


def time_claims(count: int, limits: Iterable[int]) -> dict[str, float]:
    """Return the median of *count* claims for each of *limits*, and of as many sweeps, in milliseconds."""
    session = Session("default", "benchmark")
    sweeps: list[float] = []
    figures = {}
    for limit in limits:
        claims: list[float] = []
        for _ in range(count):
            with suppress(_NotForGood), session.round() as connection:
                began = time.perf_counter()
                bands = due(sweep(connection))
                swept = time.perf_counter()
                claimed = claim(connection, bands, "benchmark", limit, 60.0)
                claims.append((time.perf_counter() - swept) * 1_000)
                sweeps.append((swept - began) * 1_000)
                assert len(claimed) == limit, f"{len(claimed)} jobs were claimed, not {limit}"
                raise _NotForGood
        figures[f"claim_{limit}_ms"] = median(claims)
    session.close()
    return {**figures, "sweep_ms": median(sweeps)}
