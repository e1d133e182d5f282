"""``python -m tests.benchmarks``: see the package."""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "example_project")]  # for embedded_pg

from psycopg.conninfo import conninfo_to_dict  # noqa: E402

from . import backlog, drain, enqueue, horizon, idle, latency, mixed, notify  # noqa: E402
from .bench import Case, Options, measure  # noqa: E402
from .machine import describe  # noqa: E402
from .report import report  # noqa: E402
from .server import Databases, find_pgbench, find_programs, private_server  # noqa: E402
from .systems import PEERS, Ours, System  # noqa: E402


class Benchmark(NamedTuple):
    """What it measures, the settings of the server that it needs, and what it makes of all results together."""

    cases: Callable[[Options], Sequence[Case]]
    settings: Callable[[Path | None], dict[str, str]] = lambda programs: {}
    add_ratios: Callable[[list[dict[str, Any]]], None] = lambda results: None


BENCHMARKS = {
    "drain": Benchmark(drain.cases),
    "enqueue": Benchmark(enqueue.cases),
    "latency": Benchmark(latency.cases),
    "horizon": Benchmark(horizon.cases, horizon.settings),
    "backlog": Benchmark(backlog.cases, add_ratios=backlog.add_ratios),
    "idle": Benchmark(idle.cases, idle.settings),
    "notify": Benchmark(notify.cases, add_ratios=notify.add_ratios),
    "mixed": Benchmark(mixed.cases),
}


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    if arguments.benchmark == "report":
        print(report(arguments.files, arguments.svg))
        return 0
    benchmark = BENCHMARKS[arguments.benchmark]
    began = time.monotonic()
    with _databases(arguments, benchmark.settings(arguments.postgres)) as databases:
        options = Options(
            systems=[kind(databases) for kind in (Ours, *(PEERS[name] for name in arguments.peers))],
            databases=databases,
            pgbench=find_pgbench(arguments.postgres),
            runs=arguments.runs,
            jobs=arguments.jobs,
            variants=arguments.variants,
            quick=arguments.quick,
            minutes=arguments.minutes,
        )
        Ours.flags = arguments.flags.split() if arguments.flags else None
        if options.pgbench is None:
            print("pgbench is not on this machine: its reference is left out.", file=sys.stderr)
        options.systems = [system for system in options.systems if _is_ready(system)]
        machine = describe(databases)
        results = measure(benchmark.cases(options), options.runs)
    benchmark.add_ratios(results)
    print(f"It took {time.monotonic() - began:.0f} s.", file=sys.stderr)
    text = json.dumps({"benchmark": arguments.benchmark, "machine": machine, "results": results}, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    else:
        print(text)
    return 1 if any("error" in result for result in results) else 0


@contextmanager
def _databases(arguments: argparse.Namespace, settings: dict[str, str]) -> Iterator[Databases]:
    directory = Path(tempfile.mkdtemp(prefix="pgqueue-bench-", dir=arguments.data))
    directory.chmod(0o755)  # the server may run as another user
    try:
        if arguments.server:
            databases = Databases({**conninfo_to_dict(arguments.server)}, directory)
            try:
                yield databases
            finally:
                databases.drop_all()
        else:
            with private_server(directory, arguments.postgres, settings) as databases:
                yield databases
    finally:
        if not arguments.keep:
            shutil.rmtree(directory, ignore_errors=True)


def _is_ready(system: System) -> bool:
    try:
        system.prepare()
    except (RuntimeError, OSError) as error:  # no npm, no package index
        print(f"{system.name} is left out. {error}", file=sys.stderr)
        return False
    return True


def _leave(number: int, frame: object) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        story = sys.modules[benchmark.cases.__module__].__doc__ or ""
        command = commands.add_parser(name, help=story.strip().splitlines()[0].partition(": ")[2], description=story)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        _add_flags(command)
    reporter = commands.add_parser("report", help="tables, and plots, from files that --json has written")
    reporter.add_argument("files", nargs="+", type=Path, metavar="FILE")
    reporter.add_argument("--svg", type=Path, metavar="DIRECTORY", help="put the plots there")
    return parser.parse_args(words)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", type=_peers, default=[], metavar="NAME,...", help=f"measure these, too: {', '.join(PEERS)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each case (default: 3)")
    parser.add_argument("--jobs", type=int, metavar="N", help="of each run (default: as many as take a second or two)")
    parser.add_argument(
        "--variants", type=lambda text: text.split(","), default=(), metavar="NAME,...", help="only these"
    )
    parser.add_argument("--quick", action="store_true", help="a smaller size, for a look")
    parser.add_argument("--minutes", type=float, default=0, metavar="N", help="horizon: produce for so long")
    parser.add_argument("--data", type=Path, metavar="DIRECTORY", help="where the server's files go; a durable disk")
    parser.add_argument(
        "--postgres",
        type=lambda text: None if text == "wheel" else Path(text),
        default=find_programs(),
        metavar="DIRECTORY",
        help="the server's programs; 'wheel' for those of the wheel, which serve when the machine has none",
    )
    parser.add_argument("--flags", metavar="FLAGS", help="of runworker in every variant, to try what is best")
    parser.add_argument("--server", metavar="CONNINFO", help="a server that runs, instead of a private one")
    parser.add_argument("--keep", action="store_true", help="leave logs and the server's files behind")


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - PEERS.keys():
        raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    raise SystemExit(main())
