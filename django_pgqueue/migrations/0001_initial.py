import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

import django_pgqueue.functions

# Two updates a job leave two dead rows behind, and the table may hold millions of finished jobs: autovacuum must
# come after some thousands of dead rows, not after a fifth of the table.
STORAGE_SQL = """
ALTER TABLE django_pgqueue_job SET (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 1000
)
"""


def set_storage(apps, schema_editor):
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(STORAGE_SQL)


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Job",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False, verbose_name="id")),
                (
                    "backend",
                    models.CharField(
                        help_text="The alias in TASKS that enqueued the job.", max_length=128, verbose_name="backend"
                    ),
                ),
                ("queue_name", models.CharField(max_length=128, verbose_name="queue")),
                (
                    "task_path",
                    models.CharField(
                        help_text="The function that runs, as a dotted path.", max_length=512, verbose_name="task"
                    ),
                ),
                ("args", models.JSONField(default=list, verbose_name="positional arguments")),
                ("kwargs", models.JSONField(default=dict, verbose_name="keyword arguments")),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("pending", "pending"),
                            ("blocked", "blocked"),
                            ("held", "held"),
                            ("running", "running"),
                            ("done", "done"),
                            ("failed", "failed"),
                            ("cancelled", "cancelled"),
                        ],
                        default="pending",
                        max_length=16,
                        verbose_name="status",
                    ),
                ),
                (
                    "priority",
                    models.SmallIntegerField(
                        default=0, help_text="From -100 to 100; higher runs first.", verbose_name="priority"
                    ),
                ),
                (
                    "available_at",
                    models.DateTimeField(
                        db_default=django_pgqueue.functions.ClockTimestamp(),
                        help_text="The job does not run before.",
                        verbose_name="available at",
                    ),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django_pgqueue.functions.ClockTimestamp(), verbose_name="created at"
                    ),
                ),
                (
                    "attempts",
                    models.IntegerField(
                        default=0,
                        help_text="Attempts begun since the job was enqueued or requeued.",
                        validators=[django.core.validators.MinValueValidator(0)],
                        verbose_name="attempts",
                    ),
                ),
                (
                    "max_attempts",
                    models.IntegerField(
                        default=5,
                        help_text="When these are used up, the job is failed.",
                        validators=[django.core.validators.MinValueValidator(1)],
                        verbose_name="max attempts",
                    ),
                ),
                (
                    "snoozes",
                    models.IntegerField(
                        db_default=0,
                        help_text="How often the task asked to be run later without an attempt.",
                        verbose_name="snoozes",
                    ),
                ),
                (
                    "claim_version",
                    models.BigIntegerField(
                        default=0,
                        help_text="Only rises. A worker that holds an older version can no longer change the job.",
                        verbose_name="claim version",
                    ),
                ),
                ("claimed_by", models.CharField(blank=True, max_length=255, null=True, verbose_name="claimed by")),
                ("claimed_at", models.DateTimeField(blank=True, null=True, verbose_name="claimed at")),
                (
                    "lease_until",
                    models.DateTimeField(
                        blank=True,
                        help_text="Unless the worker renews its claim until then, the job goes back.",
                        null=True,
                        verbose_name="lease until",
                    ),
                ),
                ("job_key", models.CharField(blank=True, max_length=255, null=True, verbose_name="job key")),
                ("last_error", models.TextField(blank=True, null=True, verbose_name="last error")),
                ("return_value", models.JSONField(blank=True, null=True, verbose_name="return value")),
                (
                    "started_at",
                    models.DateTimeField(
                        blank=True, help_text="When the first attempt began.", null=True, verbose_name="started at"
                    ),
                ),
                ("finished_at", models.DateTimeField(blank=True, null=True, verbose_name="finished at")),
            ],
            options={
                "verbose_name": "job",
                "verbose_name_plural": "jobs",
                "db_table": "django_pgqueue_job",
                "permissions": [
                    ("requeue_job", "Can requeue job"),
                    ("cancel_job", "Can cancel job"),
                    ("hold_job", "Can hold job"),
                ],
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        models.F("queue_name"),
                        models.OrderBy(models.F("priority"), descending=True),
                        models.F("available_at"),
                        models.F("id"),
                        condition=models.Q(("status", "pending")),
                        name="pgqueue_job_pending",
                    ),
                    models.Index(
                        condition=models.Q(("status", "running")), fields=["lease_until"], name="pgqueue_job_running"
                    ),
                    models.Index(
                        models.OrderBy(models.F("finished_at"), descending=True),
                        models.OrderBy(models.F("id"), descending=True),
                        condition=models.Q(("status", "failed")),
                        name="pgqueue_job_failed",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            ("status__in", ["pending", "blocked", "held", "running", "done", "failed", "cancelled"])
                        ),
                        name="pgqueue_job_status",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("priority__range", (-100, 100))), name="pgqueue_job_priority"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("attempts__gte", 0), ("max_attempts__gte", 1)), name="pgqueue_job_attempts"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("finished_at__isnull", False), ("status__in", ("done", "failed", "cancelled"))),
                            models.Q(
                                ("finished_at__isnull", True), ("status__in", ("pending", "blocked", "held", "running"))
                            ),
                            _connector="OR",
                        ),
                        name="pgqueue_job_finished_at",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("claimed_at__isnull", False),
                                ("claimed_by__isnull", False),
                                ("lease_until__isnull", False),
                                ("status", "running"),
                            ),
                            models.Q(models.Q(("status", "running"), _negated=True), ("lease_until__isnull", True)),
                            _connector="OR",
                        ),
                        name="pgqueue_job_lease",
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(
                            ("job_key__isnull", False), ("status__in", ("pending", "blocked", "held", "running"))
                        ),
                        fields=("task_path", "job_key"),
                        name="pgqueue_job_key",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Worker",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False, verbose_name="id")),
                ("name", models.CharField(max_length=255, verbose_name="name")),
                ("hostname", models.CharField(max_length=255, verbose_name="host")),
                ("process_id", models.IntegerField(verbose_name="process id")),
                ("queues", models.TextField(verbose_name="queues")),
                (
                    "concurrency",
                    models.IntegerField(
                        help_text="How many jobs it runs at the same time.", verbose_name="concurrency"
                    ),
                ),
                (
                    "started_at",
                    models.DateTimeField(
                        db_default=django_pgqueue.functions.ClockTimestamp(), verbose_name="started at"
                    ),
                ),
                (
                    "seen_at",
                    models.DateTimeField(
                        db_default=django_pgqueue.functions.ClockTimestamp(), verbose_name="last seen at"
                    ),
                ),
            ],
            options={
                "verbose_name": "worker",
                "verbose_name_plural": "workers",
                "db_table": "django_pgqueue_worker",
                "default_permissions": ("view",),
                "constraints": [models.UniqueConstraint(fields=("name",), name="pgqueue_worker_name")],
            },
        ),
        migrations.CreateModel(
            name="JobAttempt",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False, verbose_name="id")),
                ("claim_version", models.BigIntegerField(verbose_name="claim version")),
                (
                    "attempt",
                    models.IntegerField(
                        help_text="Its number since the job was enqueued or requeued.", verbose_name="attempt"
                    ),
                ),
                (
                    "outcome",
                    models.CharField(
                        choices=[
                            ("error", "error"),
                            ("timeout", "timeout"),
                            ("crashed", "crashed"),
                            ("lost", "lost"),
                            ("released", "released"),
                            ("cancelled", "cancelled"),
                        ],
                        max_length=16,
                        verbose_name="outcome",
                    ),
                ),
                (
                    "counted",
                    models.BooleanField(
                        help_text="Whether it counts towards the job's max attempts; otherwise it was refunded.",
                        verbose_name="counted",
                    ),
                ),
                ("error_class", models.CharField(max_length=255, verbose_name="error class")),
                (
                    "fingerprint",
                    models.CharField(
                        help_text="Equal for errors that probably have one cause.",
                        max_length=32,
                        verbose_name="fingerprint",
                    ),
                ),
                ("message", models.TextField(verbose_name="message")),
                ("traceback", models.TextField(verbose_name="traceback")),
                ("worker", models.CharField(max_length=255, verbose_name="worker")),
                ("started_at", models.DateTimeField(verbose_name="started at")),
                ("ended_at", models.DateTimeField(verbose_name="ended at")),
                (
                    "job",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="failed_attempts",
                        to="django_pgqueue.job",
                        verbose_name="job",
                    ),
                ),
            ],
            options={
                "verbose_name": "failed attempt",
                "verbose_name_plural": "failed attempts",
                "db_table": "django_pgqueue_jobattempt",
                "default_permissions": ("view",),
                "constraints": [models.UniqueConstraint(fields=("job", "claim_version"), name="pgqueue_attempt_claim")],
            },
        ),
        migrations.RunPython(set_storage, migrations.RunPython.noop),
    ]
