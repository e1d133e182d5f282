"""
The list of jobs at any size of the table: a count that stops, an order that an index has, filters without DISTINCT.
"""

import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import Any, cast

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import EmptyPage, Paginator
from django.db import connections, models
from django.db.models.expressions import Combinable
from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.translation import gettext_lazy as _

from ..backend import PgQueueBackend
from ..compat import Task, task_backends
from ..models import Job
from ..statements.claim import sweep
from ..states import Status

COUNTED_ROWS = 10_000
RECENT_ROWS = 1_000  # where the task filter looks for names
BIG_COLUMNS = ("args", "kwargs", "return_value")  # up to 1 MB each


class CappedPaginator(Paginator):
    """Counts no further than *limit*: what counting costs must not grow with the table."""

    limit = COUNTED_ROWS

    @cached_property
    def count(self) -> int:
        rows = cast(models.QuerySet, self.object_list).order_by()
        return rows[: self.limit].values("pk").count()

    @property
    def is_capped(self) -> bool:
        """Whether there may be more rows than were counted."""
        return self.count >= self.limit

    def validate_number(self, number: Any) -> int:
        try:
            return super().validate_number(number)
        except EmptyPage:
            # The rows of a later page may well exist: no error then, but the last page that was counted.
            if self.is_capped and int(number) > self.num_pages:
                return self.num_pages
            raise


class AtLeast(int):
    """A count that was capped: shown as "10000+", also where people are offered to select all of them."""

    def __str__(self) -> str:
        return f"{int(self)}+"


class JobChangeList(ChangeList):
    """Reads no big columns, and orders only as an index does, whatever the URL asks for."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> models.QuerySet:
        return super().get_queryset(request, exclude_parameters).defer(*BIG_COLUMNS)

    def get_ordering(self, request: HttpRequest, queryset: models.QuerySet) -> list[str | Combinable]:
        # Dead letters by their own index: the primary key would be walked past every job done since.
        return ["-finished_at", "-pk"] if self.params.get("status") == Status.FAILED else ["-pk"]

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.page_num = min(self.page_num, self.paginator.num_pages)
        # Where digits are grouped, Django would take the sign for one of them; a plain number is better then.
        if self.paginator.is_capped and number_format(self.result_count).isdigit():
            self.result_count = AtLeast(self.result_count)


class ExactFilter(admin.SimpleListFilter):
    """Offers known values of the column *field_name*, and whatever value the URL asks for."""

    field_name: str

    def known_values(self, model_admin: Any) -> Iterable[str]:
        raise NotImplementedError

    def label(self, value: str, others: Collection[str]) -> str:
        return value

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        values = {*self.known_values(model_admin), *filter(None, [self.value()])}
        return sorted(((value, self.label(value, values)) for value in values), key=lambda pair: (pair[1], pair[0]))

    def queryset(self, request: HttpRequest, queryset: models.QuerySet) -> models.QuerySet | None:
        value = self.value()
        if value is None:
            return queryset
        # PostgreSQL refuses a text with NUL, so no row has one.
        return queryset.none() if "\x00" in value else queryset.filter(**{self.field_name: value})


class StatusFilter(ExactFilter):
    title = _("status")
    parameter_name = field_name = "status"

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


def backends() -> list[PgQueueBackend]:
    """Return the backends in TASKS that keep their jobs in our table."""
    return [backend for backend in task_backends.all() if isinstance(backend, PgQueueBackend)]


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
