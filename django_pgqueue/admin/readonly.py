"""What all pages share: rows are looked at, not edited, where the backend keeps them."""

from typing import Any

import django
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import models, router
from django.http import HttpRequest

from ..backend import PgQueueBackend
from ..compat import task_backends
from ..models import Job


class ReadOnlyAdmin(admin.ModelAdmin):
    """
    Rows that are looked at and never edited here.

    *using* is the database they are read from; ``None`` means that of the first PgQueueBackend in TASKS.
    """

    using: str | None = None
    list_per_page = 50
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False

    @property
    def database(self) -> str:
        if self.using is not None:
            return self.using
        return next((backend.database for backend in backends()), router.db_for_write(Job))

    def page_context(self, request: HttpRequest, title: Any) -> dict[str, Any]:
        """Return what a page of our own needs beside its contents."""
        request.current_app = self.admin_site.name
        return {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "media": self.media,
            "checkbox_name": ACTION_CHECKBOX_NAME,
            "breadcrumbs_are_a_list": django.VERSION >= (6, 1),
        }

    def get_queryset(self, request: HttpRequest) -> models.QuerySet:
        return super().get_queryset(request).using(self.database)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def backends() -> list[PgQueueBackend]:
    """Return the backends in TASKS that keep their jobs in our table."""
    return [backend for backend in task_backends.all() if isinstance(backend, PgQueueBackend)]
