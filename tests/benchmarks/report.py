"""Tables and plots, as Markdown and SVG, from the files that ``--json`` has written."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import plots
from .environments import ROOT

Result = dict[str, Any]

# Heads of columns, in their order; what is not here is not in the tables.
FIGURES = {
    "jobs_per_s": "jobs/s",
    "cpu_us_per_job": "worker's CPU, µs/job",
    "python_us_per_job": "child's CPU less the call, µs/job",
    "last_over_first": "last / first tenth",
    "claim_p50_first_ms": "claim p50 first, ms",
    "claim_p50_last_ms": "last",
    "claim_p99_first_ms": "claim p99 first, ms",
    "claim_p99_last_ms": "last",
    "p50_ms": "p50, ms",
    "p95_ms": "p95, ms",
    "p99_ms": "p99, ms",
    "per_s": "jobs/s",
    "client_us_per_job": "client's CPU, µs/job",
    "backlog_p50": "backlog p50",
    "backlog_p99": "p99",
    "backlog_max": "max",
    "backlog_end": "at the end",
    "commits_per_s": "commits/s",
    "over_plain": "of plain",
    "claim_1_ms": "claim of 1, ms",
    "claim_100_ms": "claim of 100, ms",
    "sweep_ms": "sweep, ms",
    "over_empty": "of empty",
    "statements_per_s": "statements/s",
    "transactions_per_s": "transactions/s",
    "statements_per_job": "statements/job",
    "transactions_per_job": "transactions/job",
    "cpu_percent": "CPU, %",
    "pss_mb": "PSS, MB",
    "supervisor_pss_mb": "of which supervisor",
    "child_pss_mb": "child",
}
OURS, GRAPHILE, PGQUEUER, TASKS_DB = "django_pgqueue", "graphile-worker", "pgqueuer", "django-tasks-db"


class Goal(NamedTuple):
    """
    What a *benchmark* should show: a figure of ours, or its ratio to *other*, at least or at most *bound*.

    Places are (system, variant, figure).
    """

    benchmark: str
    ours: tuple[str, str]  # variant, figure
    other: tuple[str, str, str] | None
    sign: str
    bound: float


GOALS = (
    Goal("drain", ("sync-1", "jobs_per_s"), (GRAPHILE, "async-1", "jobs_per_s"), "≥", 0.9),
    Goal("drain", ("sync-1", "jobs_per_s"), (PGQUEUER, "async-1", "jobs_per_s"), "≥", 1.5),
    Goal("drain", ("sync-2", "jobs_per_s"), (GRAPHILE, "async-2", "jobs_per_s"), "≥", 1.0),
    Goal("drain", ("async-1", "jobs_per_s"), (PGQUEUER, "async-1", "jobs_per_s"), "≥", 1.0),
    Goal("drain", ("sync-1", "jobs_per_s"), (TASKS_DB, "sync-1", "jobs_per_s"), "≥", 50),
    Goal("drain", ("sync-1-results", "jobs_per_s"), (OURS, "sync-1", "jobs_per_s"), "≥", 0.7),
    Goal("drain", ("sync-1", "python_us_per_job"), None, "≤", 15),
    Goal("horizon", ("pinned", "last_over_first"), None, "≥", 0.95),
    Goal("horizon", ("pinned", "claim_p99_last_ms"), (OURS, "pinned", "claim_p99_first_ms"), "≤", 1.5),
    Goal("horizon", ("soak", "per_s"), None, "≥", 790),
    Goal("horizon", ("soak", "backlog_p99"), None, "≤", 80),  # a tenth of a second's
    Goal("backlog", ("full", "over_empty"), None, "≤", 1.3),
    Goal("latency", ("idle-worker", "p50_ms"), None, "≤", 1.0),
    Goal("latency", ("idle-worker", "p99_ms"), None, "≤", 4.0),
    Goal("latency", ("loaded", "p95_ms"), None, "≤", 10.0),
    Goal("latency", ("long-enqueue", "p95_ms"), None, "≤", 10.0),
    Goal("enqueue", ("single", "per_s"), (PGQUEUER, "single", "per_s"), "≥", 1.0),
    Goal("enqueue", ("single", "per_s"), (TASKS_DB, "single", "per_s"), "≥", 1.3),
    Goal("enqueue", ("bulk", "per_s"), (PGQUEUER, "bulk", "per_s"), "≥", 1.0),
    Goal("notify", ("enqueue", "over_plain"), None, "≥", 0.85),
    Goal("idle", ("idle", "statements_per_s"), None, "≤", 1.5),
    Goal("idle", ("idle", "cpu_percent"), None, "≤", 0.5),
    Goal("idle", ("20-children", "statements_per_job"), None, "≤", 6),
    Goal("mixed", ("mixed", "p95_ms"), (OURS, "own-queue", "p95_ms"), "≤", 1.5),
)


def report(files: Sequence[Path], svg: Path | None = None) -> str:
    """Return the tables of all *files*, what they show of the goals, and the machines; put plots into *svg*."""
    runs = [json.loads(path.read_text()) for path in files]
    parts = []
    for run in runs:
        parts.append(f"### {run['benchmark']}\n\n{_table(run['results'])}")
        if svg:
            parts += _draw(svg, _plots(run["benchmark"], run["results"]))
    parts.append(f"### Goals\n\n{_goals(runs)}")
    parts.append(f"### The machine\n\n{_machines(runs)}")
    return "\n\n".join(parts)


def _draw(svg: Path, plots: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Put *plots* into the folder *svg*, and yield links to them from docs/."""
    svg.mkdir(parents=True, exist_ok=True)
    for name, drawing in plots:
        path = svg / f"{name}.svg"
        path.write_text(drawing)
        yield f"![{name}]({os.path.relpath(path, ROOT / 'docs')})"


def _table(results: Sequence[Result]) -> str:
    names = [name for name in FIGURES if any(name in result for result in results)]
    lines = [
        f"| | | {' | '.join(FIGURES[name] for name in names)} | runs |",
        f"|---|---|{'--:|' * (len(names) + 1)}",
    ]
    for result in results:
        if "error" in result:
            cells = ["an error", *[""] * (len(names) - 1)]
        else:
            cells = [_cell(result, name, with_range=place == 0) for place, name in enumerate(names)]
        lines.append(f"| {result['system']} | {result['variant']} | {' | '.join(cells)} | {result['runs']} |")
    return "\n".join(lines)


def _cell(result: Result, name: str, with_range: bool) -> str:
    if name not in result:
        return ""
    each = result["each"].get(name, []) if with_range else []
    text = _number(result[name])
    return f"{text} ({_number(min(each))} to {_number(max(each))})" if len(each) > 1 else text


def _number(value: float) -> str:
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _goals(runs: Sequence[dict[str, Any]]) -> str:
    lines = ["| | | | measured | goal |", "|---|---|---|--:|--:|"]
    found = {
        (run["benchmark"], result["system"], result["variant"], name): value
        for run in runs
        for result in run["results"]
        for name, value in result.items()
    }
    for goal in GOALS:
        ours = found.get((goal.benchmark, OURS, *goal.ours))
        other = found.get((goal.benchmark, *goal.other)) if goal.other else 1.0
        if ours is None or not other:
            continue
        what = f"{FIGURES[goal.ours[1]]}" + (f", over {goal.other[0]} {goal.other[1]}" if goal.other else "")
        if goal.other and goal.other[:2] == (OURS, goal.ours[0]):
            what = f"{goal.ours[1]} / {goal.other[2]}"
        measured = ours / other
        met = measured >= goal.bound if goal.sign == "≥" else measured <= goal.bound
        mark = "" if met else " **missed**"
        lines.append(
            f"| {goal.benchmark} | {goal.ours[0]} | {what} | {_number(measured)}{mark} | {goal.sign} {goal.bound:g} |"
        )
    return "\n".join(lines)


def _machines(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each that is different in more than the speed of its disk at that moment."""
    disks: dict[str, list[int]] = {}
    for run in runs:
        machine = run["machine"]
        settings = ", ".join(f"`{name} = {value}`" for name, value in machine["settings"].items() if value)
        line = (
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:g} GB, {machine['system']}. "
            f"PostgreSQL {machine['postgresql']}, {settings}. "
            f"Python {machine['python']}, Django {machine['django']}, psycopg {machine['psycopg']}."
        )
        disks.setdefault(line, []).append(machine["fdatasync_per_s"])
    return "\n\n".join(
        f"{line} At the beginnings, 8 kB reached the disk {_range(rates)} times a second (`fdatasync`)."
        for line, rates in disks.items()
    )


def _range(values: Sequence[int]) -> str:
    least, greatest = min(values), max(values)
    return f"{least:,}" if least == greatest else f"{least:,} to {greatest:,}"


def _plots(benchmark: str, results: Sequence[Result]) -> Iterable[tuple[str, str]]:
    """Yield names and drawings."""
    sound = [result for result in results if "error" not in result]
    for name, title in (("jobs_per_s", "jobs a second"), ("per_s", "jobs a second"), ("p50_ms", "p50, ms")):
        if benchmark in ("drain", "enqueue", "latency") and (shown := [one for one in sound if name in one]):
            for variants in _groups(benchmark, shown):
                rows = [(f"{one['system']} {one['variant']}", one[name], one["system"] == OURS) for one in variants]
                label = benchmark if benchmark != "enqueue" else f"enqueue-{variants[0]['variant']}"
                yield label, plots.bars(f"{label}: {title}", rows)
    if lines := [(one["system"], one["rates"]) for one in sound if one["variant"] == "pinned" and "rates" in one]:
        yield "horizon", plots.lines("horizon pinned: rate in percent of the first part, from first to last job", lines)


def _groups(benchmark: str, results: Sequence[Result]) -> list[list[Result]]:
    """What goes into one plot: enqueue has one for each variant, because their sizes are far apart."""
    if benchmark == "latency":
        return [[one for one in results if one["variant"] == "idle-worker"]]
    if benchmark == "drain":
        return [results]
    variants = dict.fromkeys(one["variant"] for one in results)
    return [[one for one in results if one["variant"] == variant] for variant in variants]
