from decimal import Decimal

import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=100)),
                ("email", models.EmailField(max_length=254, verbose_name="e-mail")),
                ("item", models.CharField(max_length=100)),
                (
                    "total",
                    models.DecimalField(
                        decimal_places=2,
                        max_digits=8,
                        validators=[django.core.validators.MinValueValidator(Decimal("0.01"))],
                        verbose_name="total in euros",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "receipt_id",
                    models.CharField(
                        blank=True,
                        editable=False,
                        help_text="The id of the job that mails the receipt.",
                        max_length=64,
                    ),
                ),
            ],
            options={"ordering": ("-id",)},
        ),
    ]
