"""
The shop's pages: place an order, and watch its receipt.

`place_order` is what the example is about. The order and the job that mails its receipt are two rows
written in one transaction: they commit together, or neither was ever there.
"""

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_http_methods

from django_pgqueue.compat import TaskResultDoesNotExist

from .forms import OrderForm
from .models import Order
from .payments import CardDeclined, charge
from .tasks import send_receipt

PAYMENT_REQUIRED = 402


@require_http_methods(["GET", "HEAD", "POST"])
def shop(request: HttpRequest) -> HttpResponse:
    """
    Show the order form and the newest orders; a POST places an order.

    A placed order redirects to its page. A declined card is answered with status 402, a form with
    errors with 200.
    """
    form = OrderForm(request.POST or None, initial={"item": "Teapot", "total": "24.90"})
    status = 200
    if form.is_valid():
        try:
            order = place_order(form.save(commit=False), form.cleaned_data["card"])
        except CardDeclined:
            form.add_error("card", "The card was declined. There is no order, and no job to mail its receipt.")
            status = PAYMENT_REQUIRED
        else:
            return redirect("order", order.pk)
    return render(request, "shop/shop.html", {"form": form, "orders": Order.objects.all()[:20]}, status=status)


def place_order(order: Order, card: str) -> Order:
    """Save *order*, enqueue its receipt and charge *card*. Raises ``CardDeclined``; then nothing is left of either."""
    with transaction.atomic():
        order.save()
        order.receipt_id = send_receipt.enqueue(order.pk).id
        order.save(update_fields=["receipt_id"])
        charge(card, order.total)
    return order


@require_GET
def order_detail(request: HttpRequest, order_id: int) -> HttpResponse:
    """Show an order, and how far the job that mails its receipt has come."""
    order = get_object_or_404(Order, pk=order_id)
    try:
        receipt = send_receipt.get_result(order.receipt_id)
    except TaskResultDoesNotExist:  # done long ago, and deleted by a worker
        receipt = None
    return render(request, "shop/order.html", {"order": order, "receipt": receipt})
