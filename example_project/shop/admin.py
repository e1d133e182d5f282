from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from .models import Order


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("id", "name", "email", "item", "total", "created_at", "receipt")
    list_display_links = ("id", "name")
    search_fields = ("name", "email")
    readonly_fields = ("receipt", "created_at")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False  # only the shop's page enqueues the receipt too

    @admin.display(description="receipt")
    def receipt(self, order: Order) -> SafeString | str:
        if not order.receipt_id:
            return "-"
        url = reverse("admin:django_pgqueue_job_change", args=[order.receipt_id])
        return format_html('<a href="{}">Job {}</a>', url, order.receipt_id)
