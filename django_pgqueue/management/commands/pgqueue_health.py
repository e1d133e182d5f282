"""``manage.py pgqueue_health``: whether jobs get done, for monitoring and for people."""

import argparse
import json
import socket
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from ... import health
from ...backend import PgQueueBackend
from ...compat import task_backends


class Command(BaseCommand):
    help = (
        "Say whether the database answers, every queue has a live worker, control loops turn, and no job has waited "
        "for too long. Exit code 0 if all is well, 1 if not; the answer takes at most 15 s."
    )
    requires_system_checks = ()  # asked often, and not about the project's code

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--backend", default="default", metavar="ALIAS", help="backend in TASKS (default: default)")
        parser.add_argument(
            "--queue",
            action="append",
            dest="queues",
            default=[],
            metavar="NAME",
            help="look only at this queue; may be repeated (default: all)",
        )
        parser.add_argument(
            "--max-wait",
            type=_seconds,
            default=health.MAX_WAIT_SECONDS,
            metavar="SECONDS",
            help="how long an available job may have waited (default: 300)",
        )
        parser.add_argument(
            "--this-host",
            action="store_true",
            help="look only at the workers of this host, and at no jobs",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        checks = health.look(_question(options))
        is_well = all(check.ok for check in checks)
        if options["json"]:
            answer = {"ok": is_well, "checks": [check._asdict() for check in checks]}
            self.stdout.write(json.dumps(answer, ensure_ascii=False, indent=2))
        else:
            for check in checks:
                self.stdout.write(f"{'ok' if check.ok else 'FAILED':<7} {check.name:<9} {check.message}")
        if not is_well:
            raise SystemExit(1)


def _question(options: dict[str, Any]) -> health.Question:
    alias = options["backend"]
    if alias not in task_backends:
        raise CommandError(f"There is no backend {alias!r} in TASKS; there are: {', '.join(sorted(task_backends))}.")
    backend = task_backends[alias]
    if not isinstance(backend, PgQueueBackend):
        raise CommandError(f"TASKS[{alias!r}] is {type(backend).__name__}, which keeps no jobs in a table.")
    try:
        return health.Question.about(
            backend,
            options["queues"],
            hostname=socket.gethostname() if options["this_host"] else None,
            max_wait=options["max_wait"],
        )
    except ImproperlyConfigured as error:
        raise CommandError(str(error)) from error


def _seconds(text: str) -> float:
    number = float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return number
