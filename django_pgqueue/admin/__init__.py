"""
Jobs, dead letters and workers for people to look at, and the verbs that people have for jobs.

Looking must stay cheap and must disturb nobody: lists count to 10,000 and no further, read no arguments,
results or tracebacks, ask for no DISTINCT of the table, and no page locks a row. Whoever may view jobs sees
everything about them. Changing one takes the permission of the verb, and leaves an entry in the job's
history. Nothing is added, edited or deleted by hand.

    lists, filters   the list of jobs, at any size of the table
    page, frames     the page of one job
    dead_letters     dead letters by their cause
    verbs, words     what people do to jobs, and what is said about it
"""

from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import connections, models
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import Job, Worker
from ..states import Status
from . import dead_letters, page
from .filters import ErrorFilter, FingerprintFilter, QueueFilter, StatusFilter, TaskFilter, TimeFilter
from .lists import CappedPaginator, JobChangeList
from .readonly import ReadOnlyAdmin
from .verbs import VerbsAdmin
from .words import REQUEUE

SHOWN_ERROR_CHARS = 80  # in the list
KEY_PREFIX = "key:"  # of a search for a job key that looks like an id


@admin.register(Job)
class JobAdmin(VerbsAdmin):
    list_display = (
        "id",
        "short_task",
        "status_label",
        "created",
        "attempts_used",
        "short_error",
        "queue_name",
        "priority",
        "available",
    )
    list_display_links = ("id", "short_task")
    list_filter = (StatusFilter, TimeFilter, QueueFilter, TaskFilter, ErrorFilter, FingerprintFilter)
    ordering = ("-id",)
    paginator = CappedPaginator
    search_fields = ("=id", "=task_path", "=job_key")  # what get_search_results() makes of them
    search_help_text = _("The id of a job, the whole path of a task, or a job key (key:123 if it looks like an id).")
    sortable_by = ()
    fieldsets = (
        (
            None,
            {
                "fields": (
                    ("status_label", "attempts_used", "claimed_by"),
                    ("task_path", "job_key"),
                    ("queue_name", "priority", "backend"),
                    "last_error",
                )
            },
        ),
        (_("Arguments and result"), {"fields": ("shown_args", "shown_kwargs", "shown_return_value")}),
    )
    readonly_fields = ("status_label", "attempts_used", "shown_args", "shown_kwargs", "shown_return_value")

    class Media:
        css = {"all": ("django_pgqueue/admin.css",)}

    def get_urls(self) -> list[URLPattern]:
        name = self.url_name("dead_letters").removeprefix("admin:")
        view = self.admin_site.admin_view(self.dead_letters_view)
        return [path("dead-letters/", view, name=name), *super().get_urls()]

    # The list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return JobChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: models.QuerySet, search_term: str
    ) -> tuple[models.QuerySet, bool]:
        term = search_term.strip()
        if term.isascii() and term.isdigit() and len(term) <= 19:
            queryset = queryset.filter(pk=int(term))  # Django's "=" would compare texts, without an index
        elif term.startswith(KEY_PREFIX):
            queryset = queryset.filter(job_key=term.removeprefix(KEY_PREFIX))
        elif term:
            queryset = queryset.filter(Q(task_path=term) | Q(job_key=term))
        return queryset, False

    @admin.display(description=_("task"))
    def short_task(self, job: Job) -> SafeString:
        return format_html('<span title="{}">{}</span>', job.task_path, job.task_name)

    @admin.display(description=_("status"))
    def status_label(self, job: Job) -> SafeString:
        return format_html('<span class="pgqueue-state {}">{}</span>', job.status, job.get_status_display())

    @admin.display(description=_("attempts"))
    def attempts_used(self, job: Job) -> str:
        return gettext("%(attempts)d of %(max_attempts)d") % {
            "attempts": job.attempts,
            "max_attempts": job.max_attempts,
        }

    @admin.display(description=_("available at"))
    def available(self, job: Job) -> str:
        return page.time_text(job.available_at)

    @admin.display(description=_("created at"))
    def created(self, job: Job) -> str:
        return page.time_text(job.created_at)

    @admin.display(description=_("last error"), empty_value="")
    def short_error(self, job: Job) -> str | None:
        error = job.last_error
        return f"{error[:SHOWN_ERROR_CHARS]}…" if error and len(error) > SHOWN_ERROR_CHARS else error

    # The page of one job

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        if obj is not None:
            attempts, are_all = page.attempts(obj)
            context.update(
                timeline=page.timeline(obj),
                attempts=attempts,
                attempts_are_all=are_all,
                newest_traceback=next((attempt for attempt in attempts if attempt.traceback), None),
            )
        return super().render_change_form(request, context, add, change, form_url, obj)

    @admin.display(description=_("positional arguments"))
    def shown_args(self, job: Job) -> SafeString:
        return page.json_text(job.args)

    @admin.display(description=_("keyword arguments"))
    def shown_kwargs(self, job: Job) -> SafeString:
        return page.json_text(job.kwargs)

    @admin.display(description=_("return value"))
    def shown_return_value(self, job: Job) -> str:
        return page.json_text(job.return_value) if job.status == Status.DONE else self.get_empty_value_display()

    # Dead letters by their cause

    def dead_letters_view(self, request: HttpRequest) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            return HttpResponseNotAllowed(["GET"])
        if not self.has_view_permission(request):
            raise PermissionDenied
        groups, scanned = dead_letters.groups(connections[self.database])
        context = {
            **self.page_context(request, gettext("Dead letters by cause")),
            "groups": groups[: dead_letters.SHOWN_GROUPS],
            "groups_are_all": len(groups) <= dead_letters.SHOWN_GROUPS,
            "scanned": scanned,
            "jobs_are_all": scanned < dead_letters.SCANNED_JOBS,
            "verbs": [REQUEUE] if self.has_requeue_permission(request) else [],
        }
        return TemplateResponse(request, "admin/django_pgqueue/job/dead_letters.html", context)


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    list_display = ("name", "hostname", "queues", "concurrency", "started", "seen", "turned")
    ordering = ("name",)
    fields = ("name", "hostname", "process_id", "backend", "queues", "concurrency", "started", "seen", "turned")
    readonly_fields = ("started", "seen", "turned")

    @admin.display(description=_("started at"), ordering="started_at")
    def started(self, worker: Worker) -> str:
        return page.time_text(worker.started_at)

    @admin.display(description=_("last seen at"), ordering="seen_at")
    def seen(self, worker: Worker) -> str:
        return page.time_text(worker.seen_at)

    @admin.display(description=_("last turn at"), ordering="turned_at")
    def turned(self, worker: Worker) -> str | None:
        return None if worker.turned_at is None else page.time_text(worker.turned_at)
