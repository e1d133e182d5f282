"""
The filters of the list of jobs: none asks for a DISTINCT of the table, and each can be linked to.

What a filter offers comes from the code, from indexes, and from the newest jobs. What it finds does not depend
on that: any value may stand in the URL.

Two filters know of errors, which are kept with the attempts: those look at the newest dead letters only, as
many as the page of dead letters does.
"""

import sys
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from django.apps import apps
from django.contrib import admin
from django.db import connections, models
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from ..compat import Task
from ..models import Job
from ..statements.claim import sweep
from ..statements.database import Connection, fetch
from ..states import Status
from . import dead_letters
from .readonly import backends

RECENT_ROWS = 1_000  # where the task filter looks for names
OUT_OF_ORDER_ROWS = 1_000  # by so many ids two jobs that were created at once may be apart

# Ids rise with time, but for a few that were inserted at the same moment: the first id of the last hour is found
# by halving, in some twenty looks at the primary key. No index has created_at.
FIRST_ID_SQL = """
WITH RECURSIVE search(low, high) AS (
    SELECT min(id), max(id) + 1
      FROM django_pgqueue_job
    UNION ALL
    SELECT CASE WHEN middle.is_older THEN middle.id + 1 ELSE search.low END,
           CASE WHEN middle.is_older THEN search.high ELSE search.low + (search.high - search.low) / 2 END
      FROM search
      CROSS JOIN LATERAL (
          SELECT id, created_at < statement_timestamp() - %(age)s::interval AS is_older
            FROM django_pgqueue_job
           WHERE id >= search.low + (search.high - search.low) / 2
           ORDER BY id
           LIMIT 1
      ) AS middle
     WHERE search.low < search.high
)
SELECT max(low) FROM search
"""


class ExactFilter(admin.SimpleListFilter):
    """Offers known values of the column *field_name*, and whatever value the URL asks for."""

    field_name: str

    def known_values(self, model_admin: Any) -> Iterable[str]:
        raise NotImplementedError

    def label(self, value: str, others: Collection[str]) -> str:
        return value

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        asked = self.value()
        values = {*self.known_values(model_admin), *([] if asked is None else [asked])}
        return sorted(((value, self.label(value, values)) for value in values), key=lambda pair: (pair[1], pair[0]))

    def queryset(self, request: HttpRequest, queryset: models.QuerySet) -> models.QuerySet | None:
        value = self.value()
        if value is None:
            return queryset
        # PostgreSQL refuses a text with NUL, so no row has one.
        return queryset.none() if "\x00" in value else self.matching(queryset, value)

    def matching(self, queryset: models.QuerySet, value: str) -> models.QuerySet:
        return queryset.filter(**{self.field_name: value})


class StatusFilter(ExactFilter):
    """Its choices stand as tabs above the list."""

    title = _("status")
    parameter_name = field_name = "status"
    template = "admin/django_pgqueue/job/no_filter.html"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return Status.choices


class QueueFilter(ExactFilter):
    """Offers the queues in TASKS, and those with pending jobs, which one walk through an index finds."""

    title = _("queue")
    parameter_name = "queue"
    field_name = "queue_name"

    def known_values(self, model_admin: Any) -> Iterable[str]:
        database = model_admin.database
        for backend in backends():
            if backend.database == database:
                yield from backend.queues
        for band in sweep(connections[database]):
            yield band.queue_name


class TaskFilter(ExactFilter):
    """
    Offers the tasks of this code, and those of the newest jobs, which may be of another version of it.

    Not every task in the table: no index knows them, and a DISTINCT would read all of it. Older jobs of
    tasks that are gone are found by searching for the task's path.
    """

    title = _("task")
    parameter_name = "task"
    field_name = "task_path"

    def known_values(self, model_admin: Any) -> Iterable[str]:
        yield from _imported_task_paths()
        newest = Job.objects.using(model_admin.database).order_by("-pk")
        yield from newest.values_list("task_path", flat=True)[:RECENT_ROWS]

    def label(self, value: str, others: Collection[str]) -> str:
        name = _name_of(value)
        return name if sum(_name_of(other) == name for other in others) == 1 else value


class Period(NamedTuple):
    label: Any
    length: timedelta


class TimeFilter(admin.SimpleListFilter):
    """Created within the last hour, day or week; of dead letters, failed within it."""

    parameter_name = "since"
    periods = {
        "hour": Period(pgettext_lazy("period", "Last hour"), timedelta(hours=1)),
        "day": Period(pgettext_lazy("period", "Last 24 hours"), timedelta(days=1)),
        "week": Period(pgettext_lazy("period", "Last 7 days"), timedelta(days=7)),
    }

    def __init__(self, request: HttpRequest, params: dict[str, Any], model: Any, model_admin: Any) -> None:
        self.is_about_failures = request.GET.get("status") == Status.FAILED
        self.title = gettext("time of failure") if self.is_about_failures else gettext("time of creation")
        super().__init__(request, params, model, model_admin)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, period.label) for name, period in self.periods.items()]

    def queryset(self, request: HttpRequest, queryset: models.QuerySet) -> models.QuerySet | None:
        value = self.value()
        if value is None:
            return queryset
        if value not in self.periods:
            return queryset.none()
        length = self.periods[value].length
        if self.is_about_failures:
            return queryset.filter(finished_at__gte=Now() - length)
        first_id = _first_id_within(connections[queryset.db], length)
        return queryset.filter(pk__gte=first_id, created_at__gte=Now() - length)


class ErrorFilter(ExactFilter):
    """By the class of the error that a dead letter ended with. Offered where dead letters are listed."""

    title = _("error")
    parameter_name = "error"
    column = "error_class"

    def __init__(self, request: HttpRequest, params: dict[str, Any], model: Any, model_admin: Any) -> None:
        self.is_about_failures = request.GET.get("status") == Status.FAILED
        super().__init__(request, params, model, model_admin)

    def known_values(self, model_admin: Any) -> Iterable[str]:
        return dead_letters.error_classes(connections[model_admin.database]) if self.is_about_failures else ()

    def label(self, value: str, others: Collection[str]) -> str:
        return value.removeprefix("builtins.")

    def matching(self, queryset: models.QuerySet, value: str) -> models.QuerySet:
        # As numbers, so that a verb which works in batches means the same dead letters until its end.
        ids = dead_letters.ids_with(connections[queryset.db], **{self.column: value})
        return queryset.filter(pk__in=ids)


class FingerprintFilter(ErrorFilter):
    """By the digest that errors of one cause share; links on the page of dead letters ask for it."""

    title = _("fingerprint")
    parameter_name = "fingerprint"
    column = "fingerprint"

    def known_values(self, model_admin: Any) -> Iterable[str]:
        return ()


def _first_id_within(connection: Connection, length: timedelta) -> int:
    """Return an id below which no job is younger than *length*, and not many jobs above it are older."""
    first_id = fetch(connection, FIRST_ID_SQL, {"age": length})[0][0]
    return max(0, (first_id or 0) - OUT_OF_ORDER_ROWS)


def _imported_task_paths() -> Iterator[str]:
    """Yield the tasks in modules called ``tasks`` of installed apps, as far as this process has imported them."""
    app_names = {config.name for config in apps.get_app_configs()}
    for module_name, module in list(sys.modules.items()):
        app_name, found, rest = module_name.partition(".tasks")
        if found and app_name in app_names and rest[:1] in ("", "."):
            for value in list(vars(module).values()):
                if issubclass(type(value), Task):  # isinstance() would wake lazy objects
                    yield value.module_path


def _name_of(task_path: str) -> str:
    return task_path.rpartition(".")[2]
