from decimal import Decimal

from django.core.validators import MinValueValidator
from django.db import models


class Order(models.Model):
    name = models.CharField(max_length=100)
    email = models.EmailField("e-mail")
    item = models.CharField(max_length=100)
    total = models.DecimalField(
        "total in euros", max_digits=8, decimal_places=2, validators=[MinValueValidator(Decimal("0.01"))]
    )
    created_at = models.DateTimeField(auto_now_add=True)
    receipt_id = models.CharField(
        max_length=64, blank=True, editable=False, help_text="The id of the job that mails the receipt."
    )

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"Order {self.pk}"
