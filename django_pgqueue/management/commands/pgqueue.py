"""``manage.py pgqueue``: look at jobs and act on them from a shell, with the verbs of the admin."""

import json
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.serializers.json import DjangoJSONEncoder

from ...backend import PgQueueBackend
from ...compat import task_backends
from ...managers import Changed, JobQuerySet
from ...models import Job
from ...statements import people
from ...states import Status

VERBS = {"requeue": people.REQUEUE, "hold": people.HOLD, "unhold": people.UNHOLD, "cancel": people.CANCEL}
MEANINGS = {
    "requeue": "give failed and cancelled jobs fresh attempts",
    "hold": "set pending jobs aside",
    "unhold": "put held jobs back",
    "cancel": "end pending and held jobs without running them, and stop running ones",
}
PARTICIPLES = {"requeue": "requeued", "hold": "held", "unhold": "put back", "cancel": "cancelled"}
LISTED = (
    "id",
    "status",
    "queue_name",
    "task_path",
    "priority",
    "attempts",
    "max_attempts",
    "available_at",
    "last_error",
)
BIG_COLUMNS = ("args", "kwargs", "return_value")


class Command(BaseCommand):
    help = "List, show, requeue, hold, unhold or cancel jobs. Every verb has a --help of its own."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
        listing = verbs.add_parser("list", help="list jobs, the newest first")
        _add_filters(listing)
        listing.add_argument("--limit", type=int, default=20, metavar="N", help="how many at most (default: 20)")
        showing = verbs.add_parser("show", help="show one job and its failed attempts")
        showing.add_argument("id", type=int)
        for verb, text in MEANINGS.items():
            acting = verbs.add_parser(
                verb,
                help=text,
                description=f"{text.capitalize()}. Exit code 1 if a job given by id was not changed.",
            )
            acting.add_argument("ids", type=int, nargs="*", metavar="ID", help="the jobs")
            _add_filters(acting)
            acting.add_argument("--all", action="store_true", help="all that the verb takes, if nothing else is given")
        for each in (listing, showing, *(verbs.choices[verb] for verb in VERBS)):
            each.add_argument(
                "--backend", default="default", metavar="ALIAS", help="backend in TASKS (default: default)"
            )
            each.add_argument("--json", action="store_true", help="print one JSON document")

    def handle(self, *args: Any, **options: Any) -> None:
        jobs = _jobs_of(options["backend"])
        match options["verb"]:
            case "list":
                self._list(jobs, options)
            case "show":
                self._show(jobs, options)
            case verb:
                self._act(verb, jobs, options)

    def _list(self, jobs: JobQuerySet, options: dict[str, Any]) -> None:
        rows = list(_filtered(jobs, options).order_by("-pk").values(*LISTED)[: options["limit"]])
        if options["json"]:
            self._print_json(rows)
            return
        for row in rows:
            task = f"{row['task_path']} on {row['queue_name']}"
            attempts = f"attempt {row['attempts']} of {row['max_attempts']}"
            error = f": {row['last_error']}" if row["last_error"] else ""
            self.stdout.write(f"{row['id']:>10}  {row['status']:<9}  {task}, {attempts}{error}")

    def _show(self, jobs: JobQuerySet, options: dict[str, Any]) -> None:
        job = jobs.filter(pk=options["id"]).first()
        if job is None:
            raise CommandError(f"There is no job {options['id']}.")
        values = {field.attname: getattr(job, field.attname) for field in job._meta.concrete_fields}
        attempts = list(job.failed_attempts.order_by("claim_version").values())
        if options["json"]:
            self._print_json({**values, "failed_attempts": attempts})
            return
        for name, value in values.items():
            shown = json.dumps(value, ensure_ascii=False) if name in BIG_COLUMNS else value
            self.stdout.write(f"{name:>14}  {'' if value is None else shown}")
        for attempt in attempts:
            counted = "counted" if attempt["counted"] else "refunded"
            self.stdout.write(
                f"\nAttempt {attempt['attempt']} ({attempt['outcome']}, {counted}) by {attempt['worker']}, "
                f"{attempt['started_at']} to {attempt['ended_at']}:"
            )
            self.stdout.write(attempt["traceback"] or attempt["message"])

    def _act(self, verb: str, jobs: JobQuerySet, options: dict[str, Any]) -> None:
        chosen = _filtered(jobs, options)
        if options["ids"]:
            chosen = chosen.filter(pk__in=options["ids"])  # whatever their status, to say which are left
        elif options["all"] or options["status"] or options["queue"] or options["task"]:
            chosen = chosen.filter(status__in=VERBS[verb].takes)  # there may be millions in other statuses
        else:
            raise CommandError(f"Which jobs? Give ids, --status, --queue, --task, or --all: pgqueue {verb} --help")
        changed: Changed = getattr(chosen, verb)()
        if options["json"]:
            self._print_json({"verb": verb, **changed._asdict()})
        else:
            self.stdout.write(_summary(verb, changed))
        if changed.changed < len(set(options["ids"])):
            raise SystemExit(1)

    def _print_json(self, value: Any) -> None:
        self.stdout.write(json.dumps(value, cls=DjangoJSONEncoder, ensure_ascii=False, indent=2))


def _add_filters(parser: CommandParser) -> None:
    parser.add_argument("--status", choices=Status.values, metavar="STATUS", help=f"one of {', '.join(Status.values)}")
    parser.add_argument("--queue", metavar="NAME", help="only this queue")
    parser.add_argument("--task", metavar="PATH", help="only this task, as a dotted path")


def _filtered(jobs: JobQuerySet, options: dict[str, Any]) -> JobQuerySet:
    columns = {"status": options["status"], "queue_name": options["queue"], "task_path": options["task"]}
    return jobs.filter(**{column: value for column, value in columns.items() if value is not None})


def _jobs_of(alias: str) -> JobQuerySet:
    if alias not in task_backends:
        raise CommandError(f"There is no backend {alias!r} in TASKS; there are: {', '.join(sorted(task_backends))}.")
    backend = task_backends[alias]
    if not isinstance(backend, PgQueueBackend):
        raise CommandError(f"TASKS[{alias!r}] is {type(backend).__name__}, which keeps no jobs in a table.")
    try:
        return Job.objects.using(backend.database).filter(backend=alias)
    except ImproperlyConfigured as error:
        raise CommandError(str(error)) from error


def _summary(verb: str, changed: Changed) -> str:
    parts = [f"{changed.changed} {PARTICIPLES[verb]}"]
    if changed.running:
        parts[0] += f" ({changed.running} of them running, being stopped)"
    if changed.busy:
        parts.append(f"{changed.busy} busy (held by another transaction; try again)")
    if changed.skipped:
        parts.append(f"{changed.skipped} skipped (in another status)")
    if changed.key_held:
        parts.append(f"{changed.key_held} left out (a live job has the key)")
    return ", ".join(parts)
