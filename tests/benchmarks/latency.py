"""
latency: from the end of an enqueue's commit until the task begins, in milliseconds.

- `idle-worker`: 20 jobs a second, one by one, to a worker that has nothing else to do.
- `loaded`: 300 a second, in transactions that last from 0 to 100 ms after the enqueue.
- `long-enqueue`: 20 a second, while another transaction that has enqueued does not end.

All with the system's default settings. The first also for other systems.
"""

from functools import partial

from .bench import Case, Figures, Options, Stage, percentile
from .systems import Ours, System

LONGEST_MS, CLIENTS = 100, 30  # twice as many as are busy at once, on the average
WARM_UP = 20  # jobs that are not counted
SHAPES = {  # jobs, when quick, a second
    "idle-worker": (300, 60, 20),
    "loaded": (3_000, 600, 300),
    "long-enqueue": (200, 60, 20),
}


def cases(options: Options) -> list[Case]:
    found = []
    for system in options.systems:
        for name, (jobs, quick_jobs, per_second) in SHAPES.items():
            if options.wants(name) and (name == "idle-worker" or isinstance(system, Ours)):
                count = options.jobs or (quick_jobs if options.quick else jobs)
                found.append(Case(system.name, name, partial(_latency, system, name, count, per_second)))
    return found


def _latency(system: System, name: str, jobs: int, per_second: int) -> Figures:
    stage = Stage(system, system.idle)
    words = {"idle-worker": "paced", "loaded": "transactions", "long-enqueue": "beside-a-long-one"}
    more = 1 if name == "long-enqueue" else 0  # the long transaction's own job, which comes last
    with stage.workers() as workers:
        stage.drive("paced", WARM_UP, 20, 0)
        stage.wait_for(WARM_UP, workers)
        stage.wait_until_none_waits()
        more_words = (LONGEST_MS, CLIENTS) if name == "loaded" else ()
        stage.drive(words[name], jobs, per_second, WARM_UP, *more_words)
        stage.wait_for(WARM_UP + jobs + more, workers)
        stage.wait_until_none_waits()
    stage.check(WARM_UP + jobs + more)
    enqueued, began = stage.enqueued.moments(), stage.records.moments()
    # A task may begin before the commit's answer has reached its client.
    waits = [max(began[number] - enqueued[number], 0) / 1e6 for number in range(WARM_UP, WARM_UP + jobs)]
    return {f"p{percent}_ms": percentile(waits, percent) for percent in (50, 95, 99)} | {"max_ms": max(waits)}
