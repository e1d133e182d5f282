"""
How a benchmark is run: its cases in turns, several times, each figure the median of its runs.

A *case* is a system and a variant of it. The cases alternate, so that whatever else the machine does at some moment
meets all of them. A run that lost a job, or ran one twice, makes no figure: it is an error.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from .processes import Driver, Workers, running
from .record import Records
from .server import Databases, Pgbench
from .systems import System, Variant

SCRIPTS = Path(__file__).parent / "pgbench"

Figures = dict[str, float | list[float]]  # lists are for plots


class BenchmarkError(Exception):
    """A run that cannot be trusted."""


@dataclass
class Options:
    """What the command line says to every benchmark; ``None`` for its own default."""

    systems: list[System]
    databases: Databases
    pgbench: Path | None
    runs: int = 3
    jobs: int | None = None
    variants: Sequence[str] = ()
    quick: bool = False
    minutes: float = 0.0

    def wants(self, variant: str) -> bool:
        return not self.variants or variant in self.variants

    def pgbench_on(self, database: str) -> Pgbench:
        assert self.pgbench is not None
        return Pgbench(self.pgbench, self.databases, database)

    def reference_database(self, jobs: int = 0) -> str:
        """Return the name of a fresh database for pgbench, with so many pending *jobs*."""
        databases = self.databases
        database = databases.fresh("pgbench", lambda name: databases.value(name, (SCRIPTS / "schema.sql").read_text()))
        with databases.connect(database) as connection:
            connection.execute(
                "INSERT INTO job (args) SELECT jsonb_build_array(n) FROM generate_series(1, %s) n", [jobs]
            )
            connection.execute("ANALYZE")
            connection.execute("CHECKPOINT")
        return database

    def check_reference(self, database: str, jobs: int) -> None:
        done = self.databases.value(database, "SELECT count(*) FROM job WHERE status = 'done' AND attempts = 1")
        if done != jobs:
            raise BenchmarkError(f"{done} of {jobs} jobs are done.")


@dataclass(frozen=True)
class Case:
    system: str
    variant: str
    run: Callable[[], Figures]


def measure(cases: Sequence[Case], runs: int) -> list[dict[str, Any]]:
    """Run the *cases* in turns and return the results, with an ``error`` in place of figures where there was one."""
    found: dict[Case, list[Figures]] = {case: [] for case in cases}
    errors: dict[Case, str] = {}
    for number in range(runs):
        for case in cases if number % 2 == 0 else reversed(cases):
            if case in errors:
                continue
            began = time.monotonic()
            try:
                figures = case.run()
            except (BenchmarkError, RuntimeError, psycopg.Error) as error:
                errors[case] = str(error)
                _say(f"{case.system} {case.variant}, run {number + 1}: ERROR: {error}")
                continue
            found[case].append(figures)
            seconds = time.monotonic() - began
            _say(f"{case.system} {case.variant}, run {number + 1}, {seconds:.1f} s: {_shown(figures)}")
    return [_result(case, found[case], errors.get(case)) for case in cases]


def _result(case: Case, found: list[Figures], error: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {"system": case.system, "variant": case.variant, "runs": len(found)}
    if error:
        return {**result, "error": error}
    each = {name: [figures[name] for figures in found] for name in found[0]}
    return {**result, **{name: _median(values) for name, values in each.items()}, "each": each}


def _median(values: list[Any]) -> Any:
    """Of lists, that of each place."""
    if isinstance(values[0], list):
        return [_median(list(place)) for place in zip(*values, strict=False)]
    middle = median(values)
    return round(middle, 1) if abs(middle) >= 100 else round(middle, 4)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which *percent* of *values* are."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


def _shown(figures: Figures) -> str:
    numbers = {name: value for name, value in figures.items() if not isinstance(value, list)}
    return ", ".join(
        f"{name} {value:,.0f}" if value >= 1_000 else f"{name} {value:.4g}" for name, value in numbers.items()
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- a system's workers, and what they did


class Stage:
    """A *database* of a system, a fresh one unless named, and the record of what its workers do."""

    def __init__(self, system: System, variant: Variant, database: str | None = None) -> None:
        self.system = system
        self.variant = variant
        self.database = database or system.fresh()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{system.name}-", dir=system.databases.directory))
        self.records = Records(self.folder / "records")
        self.enqueued = Records(self.folder / "enqueued")

    def drive(self, *words: object) -> Any:
        """Let the system's driver do something, and return what it answers."""
        with self.driving(*words) as driver:
            return driver.answer()

    @contextmanager
    def driving(self, *words: object) -> Iterator[Driver]:
        """The same, while something else happens."""
        environment = self._environment(self.enqueued)
        driver = Driver([*self.system.driver(), *map(str, words)], environment)
        try:
            yield driver
        finally:
            driver.end()

    def settle_down(self) -> None:
        """Let statistics be those of the table as it is, and no checkpoint come soon."""
        with self.system.databases.connect(self.database) as connection:
            connection.execute("ANALYZE")
            connection.execute("CHECKPOINT")

    @contextmanager
    def workers(self) -> Iterator[Workers]:
        commands = self.system.worker_commands(self.variant)
        with running(commands, self._environment(self.records), self.folder / "worker.log") as workers:
            yield workers

    def wait_for(self, count: int, workers: Workers, patience: float = 60.0) -> None:
        """Wait until *count* jobs have begun. Raise if none begins for *patience* seconds."""
        seen, since = 0, time.monotonic()
        while (now := self.records.count()) < count:
            if now > seen:
                seen, since = now, time.monotonic()
            if workers.have_ended or time.monotonic() - since > patience:
                raise BenchmarkError(f"{now} of {count} jobs have begun, and no more do:\n{workers.log[-2000:]}")
            time.sleep(0.002)

    def wait_until_all_work(self, workers: Workers, jobs: int, patience: float = 60.0) -> None:
        """Wait until every process of the worker has begun one of *jobs* jobs."""
        deadline = time.monotonic() + patience
        while (working := self.records.processes()) < self.variant.processes:
            if self.records.count() >= jobs:
                raise BenchmarkError(f"{jobs} jobs are so few that {working} of the processes began them all.")
            if workers.have_ended or time.monotonic() > deadline:
                raise BenchmarkError(f"{working} processes work:\n{workers.log[-2000:]}")
            time.sleep(0.001)

    def wait_until_none_waits(self, patience: float = 30.0) -> None:
        """Wait until every job's end has been written."""
        deadline = time.monotonic() + patience
        with self.system.databases.connect(self.database) as connection:
            connection.execute("SET enable_seqscan = off")  # to look often, and cheaply
            while waiting := connection.execute(self.system.waiting_sql).fetchone()[0]:
                if time.monotonic() > deadline:
                    raise BenchmarkError(f"{waiting} jobs have no end.")
                time.sleep(0.002)

    def check(self, jobs: int) -> None:
        """Raise `BenchmarkError` unless each of *jobs* jobs ran exactly once, and its row says so."""
        numbers = [number for number, _ in self.records.read()]
        if lost := set(range(jobs)).difference(numbers):
            raise BenchmarkError(f"{len(lost)} of {jobs} jobs were lost.")
        if len(numbers) > jobs:
            raise BenchmarkError(f"{jobs} jobs were run {len(numbers)} times.")
        if waiting := self.system.waiting(self.database):
            raise BenchmarkError(f"{waiting} of {jobs} jobs have no end.")
        done = self.system.done(self.database)
        if done not in (None, jobs):
            raise BenchmarkError(f"{done} of {jobs} jobs are done.")

    def _environment(self, records: Records) -> dict[str, str]:
        return self.system.environment(self.database, self.variant, BENCH_RECORDS=str(records.folder.absolute()))
