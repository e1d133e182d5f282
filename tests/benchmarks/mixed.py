"""
mixed: whether short jobs wait behind long ones while slots are free.

Jobs of 0, 5, 50 and 2,000 ms come at a steady rate to a worker with 8 slots, of which they fill fewer than six. The
wait of the 0 and 5 ms ones, from the end of their commit until they begin, is measured in that company (`mixed`) and
alone (`own-queue`).
"""

from functools import partial

from .bench import Case, Figures, Options, Stage, percentile
from .systems import Ours, System, Variant

# Milliseconds of ten jobs that follow each other: with 25 a second, one of 2,000 ms begins every 0.4 s.
PATTERN = (0, 5, 0, 50, 5, 0, 5, 0, 5, 2_000)
PER_SECOND = 25
SHORT = 5
SECONDS, QUICK_SECONDS = 30, 8


def cases(options: Options) -> list[Case]:
    ours = next(system for system in options.systems if isinstance(system, Ours))
    seconds = QUICK_SECONDS if options.quick else SECONDS
    return [
        Case(ours.name, name, partial(_mixed, ours, name == "own-queue", seconds))
        for name in ("mixed", "own-queue")
        if options.wants(name)
    ]


def _mixed(system: System, is_alone: bool, seconds: int) -> Figures:
    pattern = [milliseconds for milliseconds in PATTERN if not is_alone or milliseconds <= SHORT]
    per_second = PER_SECOND * len(pattern) / len(PATTERN)  # of short ones, as many in both cases
    jobs = int(seconds * per_second)
    stage = Stage(system, Variant(1, {"flags": ["--concurrency", "8"], "pattern": pattern}, "pattern"))
    with stage.workers() as workers:
        stage.drive("paced", len(pattern), 20, 0)  # the worker learns how long they are
        stage.wait_for(len(pattern), workers)
        stage.wait_until_none_waits()
        stage.drive("paced", jobs, per_second, len(pattern))
        stage.wait_for(len(pattern) + jobs, workers)
        stage.wait_until_none_waits()
    stage.check(len(pattern) + jobs)
    enqueued, began = stage.enqueued.moments(), stage.records.moments()
    waits = [
        max(began[number] - enqueued[number], 0) / 1e6
        for number in range(len(pattern), len(pattern) + jobs)
        if pattern[number % len(pattern)] <= SHORT
    ]
    return {f"p{percent}_ms": percentile(waits, percent) for percent in (50, 95, 99)} | {"max_ms": max(waits)}
