"""
Requeue, hold, unhold and cancel, as actions of the list and on the page of one job.

    a few selected jobs      done at once, in batches; what is busy is passed over and counted
    more of them, or all     the same after a page that says how many would change
    that match the filter
    one job, on its page     done, or "busy" at once

Each verb takes its permission, which is asked for twice: where Django offers the action, and where the
request arrives. The verbs themselves live in `managers`; what is said about them in `words`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db import models, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext_lazy as _

from ..exceptions import JobBusy, JobKeyHeld
from ..managers import Changed, JobQuerySet
from ..models import Job
from .history import log_many
from .lists import JobChangeList, capped_count
from .readonly import ReadOnlyAdmin
from .words import BUSY, BUSY_ONE, CANCEL, HOLD, KEY_HELD, KEY_HELD_ONE, REQUEUE, UNHOLD, VERBS, Words

UNCONFIRMED_JOBS = 20  # this many may be selected and changed without a question
ACTION_FIELDS = ("action", "CHANGE_FORM-action")  # of the list, and of the page on Django 6.1
ACTIONS_ARE_ON_PAGES = hasattr(admin, "ActionLocation")


def verb_action(*, permissions: list[str], one: Any, many: Any) -> Callable[[Callable], Callable]:
    """An action of the list, and of the page of one job where Django has such."""
    if not ACTIONS_ARE_ON_PAGES:  # before Django 6.1
        return admin.action(permissions=permissions, description=many)
    location = [admin.ActionLocation.CHANGE_LIST, admin.ActionLocation.CHANGE_FORM]
    return admin.action(permissions=permissions, description=one, description_plural=many, location=location)


class VerbsAdmin(ReadOnlyAdmin):
    """Jobs that people may change by verbs, each by those who have its permission."""

    actions = tuple(VERBS)

    @verb_action(permissions=["requeue"], one=_("Requeue this job"), many=_("Requeue selected %(verbose_name_plural)s"))
    def requeue(self, request: HttpRequest, queryset: JobQuerySet) -> HttpResponse | None:
        return self._act(request, queryset, REQUEUE)

    @verb_action(permissions=["hold"], one=_("Hold this job"), many=_("Hold selected %(verbose_name_plural)s"))
    def hold(self, request: HttpRequest, queryset: JobQuerySet) -> HttpResponse | None:
        return self._act(request, queryset, HOLD)

    @verb_action(permissions=["hold"], one=_("Unhold this job"), many=_("Unhold selected %(verbose_name_plural)s"))
    def unhold(self, request: HttpRequest, queryset: JobQuerySet) -> HttpResponse | None:
        return self._act(request, queryset, UNHOLD)

    @verb_action(permissions=["cancel"], one=_("Cancel this job"), many=_("Cancel selected %(verbose_name_plural)s"))
    def cancel(self, request: HttpRequest, queryset: JobQuerySet) -> HttpResponse | None:
        return self._act(request, queryset, CANCEL)

    def has_requeue_permission(self, request: HttpRequest, obj: Job | None = None) -> bool:
        return self._has_own_permission(request, "requeue")

    def has_hold_permission(self, request: HttpRequest, obj: Job | None = None) -> bool:
        return self._has_own_permission(request, "hold")

    def has_cancel_permission(self, request: HttpRequest, obj: Job | None = None) -> bool:
        return self._has_own_permission(request, "cancel")

    def may(self, request: HttpRequest, verb: Words) -> bool:
        return getattr(self, f"has_{verb.permission}_permission")(request)

    # Where requests arrive

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.verb_view)
        return [
            path(f"<path:object_id>/{name}/", view, {"name": name}, name=self.url_name(name).removeprefix("admin:"))
            for name in VERBS
        ] + super().get_urls()

    def verb_view(self, request: HttpRequest, object_id: str, name: str) -> HttpResponse:
        """Do the verb *name* to one job and go back to its page, which says what became of it."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not (self.has_view_permission(request) and self.may(request, VERBS[name])):
            raise PermissionDenied
        job = self.get_object(request, unquote(object_id))
        if job is not None:
            self._change_one(request, job, VERBS[name])
        return HttpResponseRedirect(self._page_of(request, object_id))  # which says so if there is no such job

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        self._refuse_forbidden_actions(request)
        return super().changelist_view(request, extra_context)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        self._refuse_forbidden_actions(request)
        return super().changeform_view(request, object_id, form_url, extra_context)

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
            possible = [verb for verb in VERBS.values() if obj.status in verb.takes and self.may(request, verb)]
            if ACTIONS_ARE_ON_PAGES:
                _offer_only(context, [verb.name for verb in possible])
            else:
                context["verbs"] = [
                    {"label": verb.button, "url": self._page_of(request, str(obj.pk), verb.name)} for verb in possible
                ]
        return super().render_change_form(request, context, add, change, form_url, obj)

    def url_name(self, page: str) -> str:
        return f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"

    def _refuse_forbidden_actions(self, request: HttpRequest) -> None:
        # Django passes over an action that the user may not run, and shows the page as if nothing were wrong.
        asked = {name for field in ACTION_FIELDS for name in request.POST.getlist(field)}
        if any(verb.name in asked and not self.may(request, verb) for verb in VERBS.values()):
            raise PermissionDenied

    def _has_own_permission(self, request: HttpRequest, name: str) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.{get_permission_codename(name, self.opts)}")

    # Doing it

    def _act(self, request: HttpRequest, queryset: JobQuerySet, verb: Words) -> HttpResponse | None:
        if request.resolver_match is not None and "object_id" in request.resolver_match.kwargs:
            for job in queryset:  # the one of this page
                self._change_one(request, job, verb)
        elif _must_be_confirmed(request):
            return self._confirmation(request, queryset, verb)
        else:
            change = getattr(queryset, verb.name)
            self._report(request, verb, change(partial(self._log_many, request, verb)))
        return None

    def _change_one(self, request: HttpRequest, job: Job, verb: Words) -> None:
        values = {"id": job.pk, "job_key": job.job_key}
        try:
            with transaction.atomic(using=job._state.db):
                changed = getattr(job, verb.name)()
                if changed:
                    self.log_change(request, job, str(verb.history))
        except JobBusy:
            self.message_user(request, BUSY_ONE % values, messages.WARNING)
        except JobKeyHeld:
            self.message_user(request, KEY_HELD_ONE % values, messages.WARNING)
        else:
            done_one = verb.running_one if changed.running else verb.done_one
            text, level = (done_one, messages.SUCCESS) if changed else (verb.left_one, messages.WARNING)
            self.message_user(request, text % values, level)

    def _report(self, request: HttpRequest, verb: Words, outcome: Changed) -> None:
        nothing_at_all = not any(outcome)
        if outcome.changed or nothing_at_all:
            level = messages.WARNING if nothing_at_all else messages.SUCCESS
            self.message_user(request, verb.done % {"count": outcome.changed}, level)
        if outcome.running:
            self.message_user(request, verb.running % {"count": outcome.running}, messages.SUCCESS)
        for text, count in ((BUSY, outcome.busy), (KEY_HELD, outcome.key_held), (verb.left, outcome.skipped)):
            if count:
                self.message_user(request, text % {"count": count}, messages.WARNING)

    def _log_many(self, request: HttpRequest, verb: Words, job_ids: Iterable[int]) -> None:
        log_many(request.user.pk, self.database, job_ids, str(verb.history))

    # Asking first

    def _confirmation(self, request: HttpRequest, queryset: models.QuerySet, verb: Words) -> HttpResponse:
        context = {
            **self.page_context(request, verb.title),
            "verb": verb,
            "select_across": _takes_all(request),
            "selected": _selected(request)[:1] if _takes_all(request) else _selected(request),
            "matching": capped_count(queryset),
            "changing": capped_count(queryset.filter(status__in=verb.takes)),
            "conditions": self._conditions(request) if _takes_all(request) else [],
            "list_url": request.get_full_path(),
        }
        return TemplateResponse(request, "admin/django_pgqueue/job/confirm.html", context)

    def _conditions(self, request: HttpRequest) -> list[tuple[str, str]]:
        return cast(JobChangeList, self.get_changelist_instance(request)).conditions()

    def _page_of(self, request: HttpRequest, object_id: str, page: str = "change") -> str:
        url = reverse(self.url_name(page), args=[object_id], current_app=self.admin_site.name)
        return add_preserved_filters({"preserved_filters": self.get_preserved_filters(request), "opts": self.opts}, url)


def _offer_only(context: dict[str, Any], names: list[str]) -> None:
    """Leave out of the page's actions those verbs that its job is in no state for."""
    form = context.get("action_form")
    if form is None:
        return
    field = form.fields["action"]
    field.choices = [(name, label) for name, label in field.choices if name in names or name not in VERBS]
    if not any(name for name, _label in field.choices):
        context["action_form"] = None


def _must_be_confirmed(request: HttpRequest) -> bool:
    is_confirmed = request.POST.get("confirmed") == "yes"
    return not is_confirmed and (_takes_all(request) or len(_selected(request)) > UNCONFIRMED_JOBS)


def _takes_all(request: HttpRequest) -> bool:
    """Whether the action is about all that match the filter, by the words that Django takes for a yes."""
    return forms.BooleanField(required=False).clean(request.POST.get("select_across"))


def _selected(request: HttpRequest) -> list[str]:
    return request.POST.getlist(ACTION_CHECKBOX_NAME)
