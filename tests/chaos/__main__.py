"""``python -m tests.chaos``: see the package."""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "example_project")]  # for embedded_pg; workers inherit PYTHONPATH

from . import effects, lone_faults  # noqa: E402
from .faults import Faults  # noqa: E402
from .fleet import GRACE_SECONDS, Fleet  # noqa: E402
from .producers import HIGH_TIDE, LIVE_SQL, Ledger, Producer  # noqa: E402
from .server import Server  # noqa: E402
from .verdict import Verdict  # noqa: E402

WORKERS = 3
PRODUCERS = 2
DRAIN_SECONDS = 120.0
SETTLING_SECONDS = 10.0  # before the first fault


def main() -> int:
    options = _options()
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    if not options.each:
        print(f"seed {seed}", flush=True)
    report = Report(silent=options.json)
    directory = Path(tempfile.mkdtemp(prefix="pgqueue-chaos-"))
    directory.chmod(0o755)  # the server may run as another user
    for number in (signal.SIGTERM, signal.SIGINT):  # also where a shell has told us to ignore it
        signal.signal(number, _leave)
    is_of_interest = True
    try:
        if options.each:
            answer = _each(options, directory, report)
            is_of_interest = any(measured["trouble"] for measured in answer)
            if options.json:
                print(json.dumps(answer))
            return 1 if is_of_interest else 0
        with _server(directory, options.postgres) as server, _proxy(server) as proxy:
            verdict = _run(seed, options.minutes * 60, server, proxy, directory, report)
        is_of_interest = not verdict.is_good
    except SystemExit:  # told to leave
        is_of_interest = False
        raise
    finally:
        if is_of_interest:
            print(f"The data and the logs of the server and the workers are in {directory}.", file=sys.stderr)
        else:
            shutil.rmtree(directory)
    if options.json and not verdict.is_good:
        print(*report.lines, sep="\n", file=sys.stderr)
    for words in verdict.explanations():
        print(words, file=sys.stderr)
    if options.json:
        print(json.dumps(verdict.numbers))
    else:
        report.table(verdict)
    return 0 if verdict.is_good else 1


def _leave(number: int, frame: object) -> None:
    """End what has been started, and then this process. Once is enough."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _each(options: argparse.Namespace, directory: Path, report: "Report") -> list[dict[str, Any]]:
    with (
        _server(directory, options.postgres, lone_faults.CONNECTIONS) as server,
        _proxy(server, for_producers=False) as proxy,
    ):
        from . import each  # needs Django

        return list(each.run(options.only, server, proxy, directory, report.say))


def _run(seed: int, seconds: float, server: Server, proxy: Any, directory: Path, report: "Report") -> Verdict:
    ledger = Ledger()
    fleet = Fleet(WORKERS, directory)
    producers = [Producer(number, seed, ledger) for number in range(PRODUCERS)]
    faults = Faults(seed, server, proxy, fleet, report.say)
    try:
        fleet.tend()
        for producer in producers:
            producer.start()
        began = time.monotonic()
        _chaos(seed, began + seconds, server, fleet, faults, producers, report)
        report.say("the faults are over")
        faults.end()
        _drain(server, fleet, producers, report)
        fleet.stop(GRACE_SECONDS + 30)
    finally:
        for producer in producers:
            producer.stop()
        fleet.end()
        for producer in producers:
            if producer.is_alive():
                producer.join(10)
    verdict = Verdict(server, ledger)
    verdict.blame("workers_lost", [f"{worker} ended by itself" for worker in fleet.ended_by_themselves])
    verdict.blame("workers_lost", [f"{worker} would not end" for worker in fleet.would_not_end])
    verdict.numbers |= {"faults": dict(sorted(faults.counts.items())), "seed": seed}
    return verdict


def _chaos(
    seed: int,
    until: float,
    server: Server,
    fleet: Fleet,
    faults: Faults,
    producers: list[Producer],
    report: "Report",
) -> None:
    pauses = random.Random(f"{seed} pauses")
    live = 0
    next_fault = time.monotonic() + min(SETTLING_SECONDS, (until - time.monotonic()) / 4)
    while (now := time.monotonic()) < until:
        faults.pass_time(now)
        if now >= next_fault:
            faults.happen()
            next_fault = time.monotonic() + pauses.uniform(0.3, 3)
        for words in fleet.tend():
            report.say(words)
        with suppress(psycopg.errors.LockNotAvailable):  # a fault of ours
            live = server.fetch(LIVE_SQL)[0][0]
        for producer in producers:
            producer.is_held_back = live > HIGH_TIDE
        time.sleep(0.2)


def _drain(server: Server, fleet: Fleet, producers: list[Producer], report: "Report") -> None:
    """Enqueue no more, and wait until everything has ended, or for DRAIN_SECONDS."""
    for producer in producers:
        producer.stop()
    for producer in producers:
        producer.join(30)
    deadline = time.monotonic() + DRAIN_SECONDS
    began = time.monotonic()
    while (live := server.fetch(LIVE_SQL)[0][0]) and time.monotonic() < deadline:
        for words in fleet.tend():
            report.say(words)
        time.sleep(0.2)
    report.say(f"{live} jobs are left after {time.monotonic() - began:.0f} s")


@contextmanager
def _server(directory: Path, programs: Path | None, connections: int = 300):
    server = Server(directory, programs, connections)
    try:
        server.start()
        paths = os.pathsep.join([str(ROOT), str(ROOT / "example_project"), os.environ.get("PYTHONPATH", "")])
        os.environ |= {
            "CHAOS_PORT": str(server.port),
            "CHAOS_OUTSIDE": server.outside,
            "DJANGO_SETTINGS_MODULE": "tests.chaos.settings",
            "PYTHONPATH": paths.rstrip(os.pathsep),
        }
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        server.fetch(effects.CREATE_SQL)
        yield server
    finally:
        server.stop()


@contextmanager
def _proxy(server: Server, *, for_producers: bool = True):
    """The network between the server and everyone else here, but those outside."""
    from django.db import connections

    from tests.proxy import Proxy  # needs Django

    proxy = Proxy(("127.0.0.1", server.port), "postgres", dbname="postgres")
    try:
        connections["default"].close()
        if for_producers:
            connections["default"].settings_dict["PORT"] = str(proxy.port)  # for all threads
        else:
            connections["default"].settings_dict["OPTIONS"]["application_name"] = "outside"
        os.environ["CHAOS_PORT"] = str(proxy.port)  # for workers
        yield proxy
    finally:
        connections.close_all()
        proxy.close()


class Report:
    def __init__(self, silent: bool) -> None:
        self.lines: list[str] = []
        self._silent = silent
        self._began = time.monotonic()

    def say(self, words: str) -> None:
        self.lines.append(f"{time.monotonic() - self._began:7.1f} s  {words}")
        if not self._silent:
            print(self.lines[-1], flush=True)

    def table(self, verdict: Verdict) -> None:
        for name, value in verdict.numbers.items():
            if isinstance(value, dict):
                print(f"{name:>20}")
                for kind, count in value.items():
                    print(f"{count:>20}  {kind.replace('_', ' ')}")
            else:
                print(f"{name:>20}  {value}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=sys.modules["tests.chaos"].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=1.0, metavar="N", help="how long faults happen (default: 1)")
    parser.add_argument("--json", action="store_true", help="say nothing but the seed and, last, one JSON object")
    parser.add_argument("--each", action="store_true", help="each fault alone, and what it costs, in about ten minutes")
    parser.add_argument(
        "--only", action="append", default=[], choices=lone_faults.FAULTS, metavar="KIND", help="of those, this one"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="repeat the choices of another run")
    parser.add_argument(
        "--postgres", type=Path, metavar="DIRECTORY", help="the server's programs (default: those of a wheel)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    threading.current_thread().name = "chaos"
    raise SystemExit(main())
