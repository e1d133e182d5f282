"""
Jobs and workers for people to look at, and *requeue*, the one verb so far that people have here.

Looking must stay cheap and must disturb nobody: the list counts to 10,000 and no further, reads no
arguments, results or tracebacks, asks for no DISTINCT of the table, and no page locks a row. Whoever may
view jobs sees everything about them. Changing one takes the permission of the verb, and leaves an entry in
the job's history. Nothing is added, edited or deleted by hand.

The verbs themselves live in `managers`; here are a permission, a call, and a sentence about its outcome.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db import models, router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..exceptions import JobBusy
from ..managers import JobQuerySet
from ..models import Job, Worker
from ..states import REQUEUABLE, Status
from . import page
from .lists import CappedPaginator, JobChangeList, QueueFilter, StatusFilter, TaskFilter, backends

SHOWN_ERROR_CHARS = 80  # in the list


class ReadOnlyAdmin(admin.ModelAdmin):
    """
    Rows that are looked at and never edited here.

    *using* is the database they are read from; ``None`` means that of the first PgQueueBackend in TASKS.
    """

    using: str | None = None

    @property
    def database(self) -> str:
        if self.using is not None:
            return self.using
        return next((backend.database for backend in backends()), router.db_for_write(Job))

    def get_queryset(self, request: HttpRequest) -> models.QuerySet:
        return super().get_queryset(request).using(self.database)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Job)
class JobAdmin(ReadOnlyAdmin):
    list_display = (
        "id",
        "short_task",
        "queue_name",
        "status_label",
        "attempts_used",
        "short_error",
        "priority",
        "available",
        "created",
    )
    list_display_links = ("id", "short_task")
    list_filter = (StatusFilter, QueueFilter, TaskFilter)
    list_per_page = 50
    ordering = ("-id",)
    paginator = CappedPaginator
    search_fields = ("=id", "=task_path")  # what get_search_results() makes of them
    search_help_text = _("The id of a job, or the whole path of a task.")
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False
    sortable_by = ()
    actions = ("requeue",)
    fieldsets = (
        (
            None,
            {
                "fields": (
                    "status_label",
                    "attempts_used",
                    "task_path",
                    "queue_name",
                    "backend",
                    "priority",
                    "claimed_by",
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
        requeue = path(
            "<path:object_id>/requeue/",
            self.admin_site.admin_view(self.requeue_view),
            name=f"{self.opts.app_label}_{self.opts.model_name}_requeue",
        )
        return [requeue, *super().get_urls()]

    def has_requeue_permission(self, request: HttpRequest, obj: Job | None = None) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.{get_permission_codename('requeue', self.opts)}")

    # The list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return JobChangeList

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        # Django passes over an action that the user may not run, and shows the list as if nothing were wrong.
        if "requeue" in request.POST.getlist("action") and not self.has_requeue_permission(request):
            raise PermissionDenied
        return super().changelist_view(request, extra_context)

    def get_search_results(
        self, request: HttpRequest, queryset: models.QuerySet, search_term: str
    ) -> tuple[models.QuerySet, bool]:
        term = search_term.strip()
        if term.isascii() and term.isdigit() and len(term) <= 19:
            queryset = queryset.filter(pk=int(term))  # Django's "=" would compare texts, without an index
        elif term:
            queryset = queryset.filter(task_path=term)
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
                can_requeue=obj.status in REQUEUABLE and self.has_requeue_permission(request, obj),
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

    # Requeue

    @admin.action(permissions=["requeue"], description=_("Requeue selected %(verbose_name_plural)s"))
    def requeue(self, request: HttpRequest, queryset: JobQuerySet) -> None:
        done = queryset.requeue(partial(self._log_requeued, request))
        if done.changed or not (done.busy or done.skipped):
            text = ngettext("%(count)d job was requeued.", "%(count)d jobs were requeued.", done.changed)
            level = messages.SUCCESS if done.changed else messages.WARNING
            self.message_user(request, text % {"count": done.changed}, level)
        if done.busy:
            text = ngettext(
                "%(count)d job is busy: another transaction holds it at this moment. Try again.",
                "%(count)d jobs are busy: other transactions hold them at this moment. Try again.",
                done.busy,
            )
            self.message_user(request, text % {"count": done.busy}, messages.WARNING)
        if done.skipped:
            text = ngettext(
                "%(count)d job was left as it is: neither failed nor cancelled.",
                "%(count)d jobs were left as they are: neither failed nor cancelled.",
                done.skipped,
            )
            self.message_user(request, text % {"count": done.skipped}, messages.WARNING)

    def requeue_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Requeue one job and go back to its page, which says whether it was done, or the row was busy."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not (self.has_view_permission(request) and self.has_requeue_permission(request)):
            raise PermissionDenied
        job = self.get_object(request, unquote(object_id))
        if job is not None:
            self._requeue_one(request, job)
        return HttpResponseRedirect(self._page_of(request, object_id))  # which says so if there is no such job

    def _requeue_one(self, request: HttpRequest, job: Job) -> None:
        try:
            with transaction.atomic(using=job._state.db):
                requeued = job.requeue()
                if requeued:
                    self.log_change(request, job, gettext("Requeued."))
        except JobBusy:
            level = messages.WARNING
            text = gettext("Job %(id)d is busy: another transaction holds it at this moment. Try again.")
        else:
            level = messages.SUCCESS if requeued else messages.WARNING
            text = (
                gettext("Job %(id)d was requeued.")
                if requeued
                else gettext("Job %(id)d was left as it is: neither failed nor cancelled.")
            )
        self.message_user(request, text % {"id": job.pk}, level)

    def _log_requeued(self, request: HttpRequest, job_ids: Iterable[int]) -> None:
        jobs = Job.objects.using(self.database).filter(pk__in=job_ids).order_by("pk").only("task_path")
        LogEntry.objects.log_actions(cast(int, request.user.pk), jobs, CHANGE, gettext("Requeued."))

    def _page_of(self, request: HttpRequest, object_id: str) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        url = reverse(name, args=[object_id], current_app=self.admin_site.name)
        return add_preserved_filters({"preserved_filters": self.get_preserved_filters(request), "opts": self.opts}, url)


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    list_display = ("name", "hostname", "queues", "concurrency", "started", "seen")
    list_per_page = 50
    ordering = ("name",)
    fields = ("name", "hostname", "process_id", "queues", "concurrency", "started", "seen")
    readonly_fields = ("started", "seen")
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False

    @admin.display(description=_("started at"), ordering="started_at")
    def started(self, worker: Worker) -> str:
        return page.time_text(worker.started_at)

    @admin.display(description=_("last seen at"), ordering="seen_at")
    def seen(self, worker: Worker) -> str:
        return page.time_text(worker.seen_at)
