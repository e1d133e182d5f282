"""``manage.py runworker``: run the jobs of one backend."""

import argparse
import logging
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from ...backend import PgQueueBackend
from ...backoff import constant_of
from ...compat import task_backends
from ...conf import has_settings_module
from ...worker.config import Queues, WorkerConfig
from ...worker.logs import configure_logging
from ...worker.signals import Signals
from ...worker.supervisor import Supervisor

EXAMPLES = """
examples:
  manage.py runworker                                  all queues, 4 jobs at a time
  manage.py runworker --queue email --concurrency 16   only the queue "email", 16 at a time
  manage.py runworker --processes 4                    4 child processes with 4 slots each
  manage.py runworker --exclude-queue slow             all queues but one
  manage.py runworker --burst                          run what is due now, then end

SIGTERM or Ctrl-C: claim no more, finish what runs within --grace seconds, hand the rest back. A second
one: end at once. Exit code 0 after an orderly end, 1 if the worker could not start, 3 if it was forced.
"""

LOG_LEVELS = {0: logging.WARNING, 1: logging.INFO}


class Command(BaseCommand):
    help = "Run background jobs until told to stop."
    requires_migrations_checks = False  # the worker waits for migrate by itself

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._signals = Signals()

    def run_from_argv(self, argv: list[str]) -> None:
        self._signals.watch()  # before Django's checks
        super().run_from_argv(argv)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, epilog=EXAMPLES, **kwargs)
        parser.formatter_class = _HelpFormatter
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--backend",
            default="default",
            metavar="ALIAS",
            help="The backend in TASKS whose jobs run (default: default).",
        )
        parser.add_argument(
            "--queue",
            action="append",
            dest="queues",
            metavar="NAME",
            help="Run only the jobs of this queue; may be repeated. '*' means all (default: *).",
        )
        parser.add_argument(
            "--exclude-queue",
            action="append",
            dest="excluded",
            default=[],
            metavar="NAME",
            help="Leave this queue to other workers; may be repeated.",
        )
        parser.add_argument(
            "--concurrency",
            type=_at_least_one,
            default=4,
            metavar="N",
            help="How many jobs run at the same time (default: 4).",
        )
        parser.add_argument(
            "--processes",
            type=_at_least_one,
            default=1,
            metavar="N",
            help="How many child processes run jobs, each with --concurrency slots (default: 1).",
        )
        parser.add_argument(
            "--max-jobs",
            type=_positive,
            metavar="N",
            help="Replace a child process after it has run this many jobs (default: never).",
        )
        parser.add_argument(
            "--max-memory",
            type=_positive,
            metavar="MB",
            help="Replace a child process when it uses more than this many megabytes (default: never).",
        )
        parser.add_argument("--burst", action="store_true", help="End when no job is due any more.")
        parser.add_argument(
            "--grace",
            type=_seconds,
            default=25.0,
            metavar="SECONDS",
            help="How long running jobs may take to finish after SIGTERM (default: 25).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        config = _worker_config(options)
        configure_logging(config.log_level)
        connections.close_all()  # of the checks; this process uses its own
        if code := Supervisor(config, self._signals).run():
            raise SystemExit(code)


def _worker_config(options: dict[str, Any]) -> WorkerConfig:
    """Turn flags and the backend's options into what a worker needs; raises ``CommandError``."""
    alias = options["backend"]
    if alias not in task_backends:
        raise CommandError(f"There is no backend {alias!r} in TASKS; there are: {', '.join(sorted(task_backends))}.")
    backend = task_backends[alias]
    if not isinstance(backend, PgQueueBackend):
        raise CommandError(f"TASKS[{alias!r}] is {type(backend).__name__}; a worker needs PgQueueBackend.")
    if not has_settings_module():
        raise CommandError("A worker needs DJANGO_SETTINGS_MODULE; settings.configure() does not reach its child.")
    try:
        settled = backend.settings
        database = backend.database
    except ImproperlyConfigured as error:
        raise CommandError(str(error)) from error
    return WorkerConfig(
        backend=alias,
        database=database,
        queues=_queues(backend, options["queues"] or [], options["excluded"]),
        concurrency=options["concurrency"],
        processes=options["processes"],
        max_jobs=options["max_jobs"],
        max_memory=options["max_memory"],
        burst=options["burst"],
        grace=options["grace"],
        lease=settled.lease_seconds,
        poll=settled.poll_seconds,
        retention=settled.retention_seconds,
        constant_delay=constant_of(settled.backoff),
        notify=settled.notify,
        log_level=LOG_LEVELS.get(options["verbosity"], logging.DEBUG),
    )


def _queues(backend: PgQueueBackend, named: list[str], excluded: list[str]) -> Queues:
    unknown = sorted({name for name in (*named, *excluded) if name != "*"} - backend.queues) if backend.queues else []
    if unknown:
        raise CommandError(
            f"TASKS[{backend.alias!r}]['QUEUES'] has no {', '.join(map(repr, unknown))}; "
            f"it has: {', '.join(sorted(backend.queues))}."
        )
    if named and "*" not in named:
        return Queues(tuple(dict.fromkeys(named)), tuple(excluded))
    return Queues((), tuple(dict.fromkeys([*excluded, *sorted(backend.foreign_queues())])))


def _at_least_one(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1_000:
        raise argparse.ArgumentTypeError("must be from 1 to 1000")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 86_400:
        raise argparse.ArgumentTypeError("must be from 0 to 86400")
    return number


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples as they are written."""
