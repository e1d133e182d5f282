"""
The list of jobs at any size of the table: counts that stop, an order that an index has, tabs by status.

A count looks at no more than COUNTED_ROWS rows that match. Pending, running and failed jobs have an index of
their own; of the other statuses the tabs count those among the newest NEWEST_ROWS jobs, so their numbers may
be too low. A number that may be too low has a plus; where nothing was found but not everything was looked
at, there is no number.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple, cast

from django.contrib.admin import SimpleListFilter
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import EmptyPage, Page, Paginator
from django.db import connections, models
from django.db.models.expressions import Combinable
from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.translation import gettext

from ..statements.database import Connection, fetch
from ..states import Status

COUNTED_ROWS = 10_000
NEWEST_ROWS = 20_000
BIG_COLUMNS = ("args", "kwargs", "return_value")  # up to 1 MB each

# The last three columns are about the newest jobs only. Without a status in it, the walk through them uses the
# primary key whatever the statistics say.
COUNT_SQL = """
SELECT (SELECT count(*) FROM (
           SELECT FROM django_pgqueue_job WHERE status = 'pending' LIMIT %(counted)s
       ) AS pending) AS pending,
       (SELECT count(*) FROM (
           SELECT FROM django_pgqueue_job WHERE status = 'running' LIMIT %(counted)s
       ) AS running) AS running,
       (SELECT count(*) FROM (
           SELECT FROM django_pgqueue_job WHERE status = 'failed' LIMIT %(counted)s
       ) AS failed) AS failed,
       count(*) AS newest,
       count(*) FILTER (WHERE status = 'blocked') AS blocked,
       count(*) FILTER (WHERE status = 'held') AS held,
       count(*) FILTER (WHERE status = 'done') AS done,
       count(*) FILTER (WHERE status = 'cancelled') AS cancelled
  FROM (
    SELECT status
      FROM django_pgqueue_job
     ORDER BY id DESC
     LIMIT %(newest)s
  ) AS newest
"""
INDEXED = (Status.PENDING, Status.RUNNING, Status.FAILED)


class AtLeast(int):
    """A count that was capped: shown as "10000+", also where people are offered to select all of them."""

    def __str__(self) -> str:
        return f"{int(self)}+"


class Tab(NamedTuple):
    """One status above the list. *number* is empty where it is not known."""

    label: str
    number: str
    url: str
    is_current: bool


def capped_count(rows: models.QuerySet, limit: int = COUNTED_ROWS) -> int:
    """Count *rows*, to *limit* and no further: what counting costs must not grow with the table."""
    count = rows.order_by()[:limit].values("pk").count()
    return AtLeast(count) if count >= limit else count


def status_counts(connection: Connection) -> dict[str, int]:
    """Return how many jobs of each status there are; what may be too low is an `AtLeast`."""
    parameters = {"counted": COUNTED_ROWS, "newest": NEWEST_ROWS}
    pending, running, failed, newest, *others = fetch(connection, COUNT_SQL, parameters)[0]
    of_newest = AtLeast if newest >= NEWEST_ROWS else int
    unindexed = [status for status in Status if status not in INDEXED]
    return {
        **{
            status: AtLeast(count) if count >= COUNTED_ROWS else count
            for status, count in zip(INDEXED, (pending, running, failed), strict=True)
        },
        **{status: of_newest(count) for status, count in zip(unindexed, others, strict=True)},
    }


class CappedPaginator(Paginator):
    """
    Counts no further than *limit*, and reads the ids that it counts.

    What is rare is looked for through the whole table, so once must be enough: for the count and for the page.
    """

    limit = COUNTED_ROWS

    @cached_property
    def count(self) -> int:
        return len(self._ids)

    def page(self, number: Any) -> Page:
        number = self.validate_number(number)
        first = (number - 1) * self.per_page
        return Page(self.rows(first, first + self.per_page), number, self)

    def rows(self, first: int, end: int) -> models.QuerySet:
        """Return the rows at these places of the list, without looking for them again."""
        return self._rows.filter(pk__in=self._ids[first:end])

    @cached_property
    def _ids(self) -> list[int]:
        return list(self._rows.values_list("pk", flat=True)[: self.limit])

    @property
    def _rows(self) -> models.QuerySet:
        return cast(models.QuerySet, self.object_list)

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
        if not self.multi_page or (self.show_all and self.can_show_all):
            # Django would look for them once more, and without a limit.
            self.result_list = cast(CappedPaginator, self.paginator).rows(0, self.result_count)
        # Where digits are grouped, Django would take the sign for one of them; a plain number is better then.
        if self.paginator.is_capped and number_format(self.result_count).isdigit():
            self.result_count = AtLeast(self.result_count)

    def tabs(self) -> Iterator[Tab]:
        """Yield a tab for all jobs and for each status; with numbers where nothing else is filtered."""
        current = self.params.get("status")
        others = [spec for spec in self._active_filters() if spec.parameter_name != "status"]
        counts = {} if others or self.query else status_counts(connections[self.root_queryset.db])
        yield Tab(gettext("All"), "", self.get_query_string(remove=["status", "p"]), current is None)
        for status in Status:
            url = self.get_query_string({"status": status.value}, remove=["p"])
            yield Tab(str(status.label), _number(counts.get(status)), url, current == status)

    def conditions(self) -> list[tuple[str, str]]:
        """Return what the list is filtered by, as pairs of a title and a value to show."""
        found = []
        for spec in self._active_filters():
            labels = {name: str(label) for name, label in spec.lookup_choices}
            value = str(spec.value())
            found.append((str(spec.title), labels.get(value, value)))
        return [*found, *([(gettext("search"), self.query)] if self.query else [])]

    def _active_filters(self) -> list[SimpleListFilter]:
        return [spec for spec in cast(list[SimpleListFilter], self.filter_specs) if spec.value() is not None]


def _number(count: int | None) -> str:
    if count is None or (count == 0 and isinstance(count, AtLeast)):
        return ""
    sign = "+" if isinstance(count, AtLeast) else ""
    return f"{number_format(int(count), force_grouping=True)}{sign}"
