"""
horizon: whether a worker stays as fast while vacuum can remove nothing.

An idle ``REPEATABLE READ`` transaction with a snapshot pins the horizon (`pinned`; `free` is the same without it)
while all jobs are run. `last_over_first` is the rate of the last tenth of the jobs over that of the first. The very
first fiftieth is left out: in it processes get up to speed, and it would flatter the ratio. The claims' own times are
read from the server's log, where it is the private one.

With ``--minutes``: four clients enqueue jobs one by one, 800 a second, the horizon pinned, and every second the
backlog is counted: those that are enqueued and have not begun.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import psycopg

from .bench import BenchmarkError, Case, Figures, Options, Stage, percentile
from .statement_log import SETTINGS, StatementLog
from .systems import Ours, System, Variant

SOAK_PER_SECOND, SOAK_CLIENTS = 800, 4
QUICK = 10  # a tenth of the jobs
WINDOWS = 20  # of the plot
WARM_UP = 50  # a fiftieth of the jobs, in which processes are still getting up to speed, is not counted


def settings(programs: Path | None) -> dict[str, str]:
    return SETTINGS


def cases(options: Options) -> list[Case]:
    if options.minutes:
        ours = next(system for system in options.systems if isinstance(system, Ours))
        return [Case(ours.name, "soak", partial(_soak, ours, options.minutes))]
    found = []
    for system in options.systems:
        jobs = options.jobs or (system.pinned_jobs or system.jobs) // (QUICK if options.quick else 1)
        variant = next(iter(system.variants.values()))
        for name, is_pinned in (("free", False), ("pinned", True)):
            if options.wants(name):
                found.append(Case(system.name, name, partial(_drain, system, variant, jobs, is_pinned)))
    return found


def _drain(system: System, variant: Variant, jobs: int, is_pinned: bool) -> Figures:
    stage = Stage(system, variant)
    stage.drive("bulk", jobs)
    stage.settle_down()
    log = StatementLog(system.databases, stage.database)
    with _horizon(stage, is_pinned), stage.workers() as workers:
        stage.wait_for(jobs, workers)
        stage.wait_until_none_waits(patience=120)
    stage.check(jobs)
    starts = [moment for _, moment in stage.records.read()][jobs // WARM_UP :]
    tenth = max(len(starts) // 10, 2)
    first, last = starts[:tenth], starts[-tenth:]
    figures: Figures = {
        "jobs_per_s": (len(starts) - 1) / (starts[-1] - starts[0]) * 1e9,
        "last_over_first": (first[-1] - first[0]) / max(last[-1] - last[0], 1),
    }
    size = max(len(starts) // WINDOWS, 2)
    parts = [starts[place : place + size] for place in range(0, len(starts) - size + 1, size)]
    figures["rates"] = [(size - 1) / max(part[-1] - part[0], 1) * 1e9 for part in parts]
    for name, part in (("first", first), ("last", last)):
        if claims := log.milliseconds(system.claim_mark, part[0], part[-1]):
            figures[f"claim_p50_{name}_ms"] = median(claims)
            figures[f"claim_p99_{name}_ms"] = percentile(claims, 99)
    return figures


def _soak(system: System, minutes: float) -> Figures:
    stage = Stage(system, system.idle)
    jobs = int(minutes * 60 * SOAK_PER_SECOND)
    backlogs = []
    with _horizon(stage, True), stage.workers() as workers:
        stage.drive("paced", 20, 20, 0)
        stage.wait_for(20, workers)
        with stage.driving("transactions", jobs, SOAK_PER_SECOND, 20, 0, SOAK_CLIENTS) as producer:
            while producer.is_running:
                time.sleep(1)
                if workers.have_ended:
                    raise BenchmarkError(f"The worker has ended:\n{workers.log[-2000:]}")
                backlogs.append(max(stage.enqueued.count() - stage.records.count(), 0))
            producer.answer()
        stage.wait_for(jobs + 20, workers)
        stage.wait_until_none_waits(patience=120)
    stage.check(jobs + 20)
    commits = [moment for number, moment in stage.enqueued.read() if number >= 20]
    return {
        "per_s": (jobs - 1) / (commits[-1] - commits[0]) * 1e9,
        "backlog_p50": median(backlogs),
        "backlog_p99": percentile(backlogs, 99),
        "backlog_max": max(backlogs),
        "backlog_end": backlogs[-1],
    }


@contextmanager
def _horizon(stage: Stage, is_pinned: bool) -> Iterator[None]:
    if not is_pinned:
        yield
        return
    with psycopg.connect(stage.system.databases.dsn(stage.database)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT txid_current()")
        yield
        connection.rollback()
