"""
horizon: whether a worker stays as fast while vacuum can remove nothing.

An idle ``REPEATABLE READ`` transaction with a snapshot pins the horizon (`pinned`; `free` is the same without it)
while all jobs are run. `last_over_first` is the rate of the last tenth of the jobs over that of the first. The very
first fiftieth is left out: in it processes get up to speed, and it would flatter the ratio. The claims' own times are
read from the server's log, where it is the private one. pgbench claims 50 jobs at a time as every article about
``SKIP LOCKED`` does.

With ``--minutes``: four clients enqueue jobs one by one, 800 a second, the horizon pinned, and every second the
backlog is counted: those that are enqueued and have not begun.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import psycopg

from .bench import SCRIPTS, BenchmarkError, Case, Figures, Options, Stage, percentile
from .server import Databases
from .statement_log import SETTINGS, StatementLog
from .systems import Ours, System, Variant

SOAK_PER_SECOND, SOAK_CLIENTS = 800, 4
QUICK = 10  # a tenth of the jobs
TEXTBOOK_JOBS, TEXTBOOK_BATCH = 100_000, 50
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
    if options.pgbench:
        jobs = (options.jobs or TEXTBOOK_JOBS // (QUICK if options.quick else 1)) // TEXTBOOK_BATCH * TEXTBOOK_BATCH
        for name, is_pinned in (("free", False), ("pinned", True)):
            if options.wants(name):
                found.append(Case("pgbench", name, partial(_textbook, options, jobs, is_pinned)))
    return found


def _drain(system: System, variant: Variant, jobs: int, is_pinned: bool) -> Figures:
    stage = Stage(system, variant)
    stage.drive("bulk", jobs)
    stage.settle_down()
    log = StatementLog(system.databases, stage.database)
    with _horizon(system.databases, stage.database, is_pinned), stage.workers() as workers:
        stage.wait_for(jobs, workers)
        stage.wait_until_none_waits(patience=120)
    stage.check(jobs)
    starts = [moment for _, moment in stage.records.read()][jobs // WARM_UP :]
    figures, first, last = _rates(starts)
    for name, (since, until) in (("first", first), ("last", last)):
        if claims := log.milliseconds(system.claim_mark, since, until):
            figures[f"claim_p50_{name}_ms"] = median(claims)
            figures[f"claim_p99_{name}_ms"] = percentile(claims, 99)
    return figures


def _textbook(options: Options, jobs: int, is_pinned: bool) -> Figures:
    """What becomes of the claim that every article has, by pgbench: it walks all dead entries each time."""
    database = options.reference_database(jobs)
    with tempfile.TemporaryDirectory(dir=options.databases.directory) as folder:
        flags = ("-t", str(jobs // TEXTBOOK_BATCH), "-l", f"--log-prefix={folder}/log")
        with _horizon(options.databases, database, is_pinned):
            options.pgbench_on(database).run(SCRIPTS / "textbook.sql", 1, *flags)
        [log] = Path(folder).iterdir()
        lines = [line.split() for line in log.read_text().splitlines()]
    options.check_reference(database, jobs)
    ends = [int(line[4]) * 1_000_000_000 + int(line[5]) * 1_000 for line in lines for _ in range(TEXTBOOK_BATCH)]
    return _rates(ends)[0]


def _rates(moments: Sequence[int]) -> tuple[Figures, tuple[int, int], tuple[int, int]]:
    """The figures of jobs at these *moments*, and the moments between which their first and last tenth are."""
    tenth = max(len(moments) // 10, 2)
    first, last = (moments[0], moments[tenth - 1]), (moments[-tenth], moments[-1])
    size = max(len(moments) // WINDOWS, 2)
    parts = [moments[place : place + size] for place in range(0, len(moments) - size + 1, size)]
    figures: Figures = {
        "jobs_per_s": (len(moments) - 1) / (moments[-1] - moments[0]) * 1e9,
        "last_over_first": (first[1] - first[0]) / max(last[1] - last[0], 1),
        "rates": [(size - 1) / max(part[-1] - part[0], 1) * 1e9 for part in parts],
    }
    return figures, first, last


def _soak(system: System, minutes: float) -> Figures:
    stage = Stage(system, system.idle)
    jobs = int(minutes * 60 * SOAK_PER_SECOND)
    backlogs = []
    with _horizon(system.databases, stage.database, True), stage.workers() as workers:
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
def _horizon(databases: Databases, database: str, is_pinned: bool) -> Iterator[None]:
    if not is_pinned:
        yield
        return
    with psycopg.connect(databases.dsn(database)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT txid_current()")
        yield
        connection.rollback()
