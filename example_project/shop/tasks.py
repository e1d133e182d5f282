from email.headerregistry import Address

from django.core.mail import EmailMessage
from django.template.loader import render_to_string

from django_pgqueue import task

from .models import Order


@task(queue_name="email", max_attempts=3)
def send_receipt(order_id: int) -> None:
    """
    Mail the receipt of an order.

    The address is read now, not when the order was placed, so correcting it in the admin is enough to
    make a failed receipt succeed when it is requeued. A job may run twice, and then two mails go out:
    they carry the same Message-ID, by which many mail programs show only one.
    """
    order = Order.objects.get(pk=order_id)
    EmailMessage(
        subject=f"Receipt for order {order.pk}",
        body=render_to_string("shop/receipt.txt", {"order": order}),
        to=[str(Address(order.name, addr_spec=order.email))],
        headers={"Message-ID": f"<order-{order.pk}@shop.example>", "X-Order": str(order.pk)},
    ).send()
