"""
The rows: a Job, the attempts of it that did not succeed, and the workers for people to look at.

The database states the rules it can (constraints below). A job changes its status only through the verbs
of `managers` and the statements beneath them, never by ``save()``.
"""

from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from .conf import MAX_JOB_KEY_LENGTH, MAX_QUEUE_NAME_LENGTH, MAX_TASK_PATH_LENGTH
from .functions import ClockTimestamp
from .managers import Changed, JobManager
from .statements import people
from .states import FINISHED, LIVE, AttemptOutcome, Status


class Job(models.Model):
    """One request to run a task."""

    id = models.BigAutoField(_("id"), primary_key=True)
    backend = models.CharField(_("backend"), max_length=128, help_text=_("The alias in TASKS that enqueued the job."))
    queue_name = models.CharField(_("queue"), max_length=MAX_QUEUE_NAME_LENGTH)
    task_path = models.CharField(
        _("task"), max_length=MAX_TASK_PATH_LENGTH, help_text=_("The function that runs, as a dotted path.")
    )
    args = models.JSONField(_("positional arguments"), default=list)
    kwargs = models.JSONField(_("keyword arguments"), default=dict)
    status = models.CharField(_("status"), max_length=16, choices=Status, default=Status.PENDING)
    priority = models.SmallIntegerField(_("priority"), default=0, help_text=_("From -100 to 100; higher runs first."))
    available_at = models.DateTimeField(
        _("available at"), db_default=ClockTimestamp(), help_text=_("The job does not run before.")
    )
    created_at = models.DateTimeField(_("created at"), db_default=ClockTimestamp())
    attempts = models.IntegerField(
        _("attempts"),
        default=0,
        validators=[MinValueValidator(0)],
        help_text=_("Attempts begun since the job was enqueued or requeued."),
    )
    max_attempts = models.IntegerField(
        _("max attempts"),
        default=5,
        validators=[MinValueValidator(1)],
        help_text=_("When these are used up, the job is failed."),
    )
    snoozes = models.IntegerField(
        _("snoozes"), db_default=0, help_text=_("How often the task asked to be run later without an attempt.")
    )
    claim_version = models.BigIntegerField(
        _("claim version"),
        default=0,
        help_text=_("Only rises. A worker that holds an older version can no longer change the job."),
    )
    claimed_by = models.CharField(_("claimed by"), max_length=255, null=True, blank=True)  # noqa: DJ001 (never claimed)
    claimed_at = models.DateTimeField(_("claimed at"), null=True, blank=True)
    lease_until = models.DateTimeField(
        _("lease until"),
        null=True,
        blank=True,
        help_text=_("Unless the worker renews its claim until then, the job goes back."),
    )
    job_key = models.CharField(_("job key"), max_length=MAX_JOB_KEY_LENGTH, null=True, blank=True)  # noqa: DJ001 (most have none)
    last_error = models.TextField(_("last error"), null=True, blank=True)  # noqa: DJ001 (no error yet)
    return_value = models.JSONField(_("return value"), null=True, blank=True)
    started_at = models.DateTimeField(
        _("started at"), null=True, blank=True, help_text=_("When the first attempt began.")
    )
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)

    objects = JobManager()

    class Meta:
        db_table = "django_pgqueue_job"
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        default_permissions = ("view",)
        permissions = [
            ("requeue_job", "Can requeue job"),
            ("cancel_job", "Can cancel job"),
            ("hold_job", "Can hold job"),
        ]
        constraints = [
            models.CheckConstraint(name="pgqueue_job_status", condition=Q(status__in=Status.values)),
            models.CheckConstraint(name="pgqueue_job_priority", condition=Q(priority__range=(-100, 100))),
            models.CheckConstraint(name="pgqueue_job_attempts", condition=Q(attempts__gte=0, max_attempts__gte=1)),
            models.CheckConstraint(
                name="pgqueue_job_finished_at",
                condition=Q(status__in=FINISHED, finished_at__isnull=False)
                | Q(status__in=LIVE, finished_at__isnull=True),
            ),
            models.CheckConstraint(
                name="pgqueue_job_lease",
                condition=Q(
                    status=Status.RUNNING, lease_until__isnull=False, claimed_by__isnull=False, claimed_at__isnull=False
                )
                | (~Q(status=Status.RUNNING) & Q(lease_until__isnull=True)),
            ),
            models.UniqueConstraint(
                fields=["task_path", "job_key"],
                name="pgqueue_job_key",
                condition=Q(job_key__isnull=False, status__in=LIVE),
            ),
        ]
        indexes = [
            # One index for each statement that needs one. Finished jobs stand in none but the primary key.
            models.Index(
                "queue_name",
                F("priority").desc(),
                "available_at",
                "id",
                name="pgqueue_job_pending",
                condition=Q(status=Status.PENDING),
            ),
            models.Index(fields=["lease_until"], name="pgqueue_job_running", condition=Q(status=Status.RUNNING)),
            models.Index(
                F("finished_at").desc(), F("id").desc(), name="pgqueue_job_failed", condition=Q(status=Status.FAILED)
            ),
        ]

    def __str__(self) -> str:
        return self.title(self.pk, self.task_path)

    @staticmethod
    def title(job_id: int, task_path: str) -> str:
        """What a job is called where there is room for one name: its function's, and its id."""
        return f"{task_path.rpartition('.')[2]} {job_id}"

    @property
    def task_name(self) -> str:
        """The function's name alone."""
        return self.task_path.rpartition(".")[2]

    @property
    def is_dead_letter(self) -> bool:
        return self.status == Status.FAILED

    def hold(self) -> Changed:
        """Set this pending job aside, so that it does not run until `unhold`. See `requeue`."""
        return self._change(people.HOLD)

    def unhold(self) -> Changed:
        """Put this held job back. See `requeue`."""
        return self._change(people.UNHOLD)

    def cancel(self) -> Changed:
        """
        End this pending or held job without running it, or stop it if it is running. See `requeue`.

        Of what is returned, *running* is 1 if a worker was running the job: its task is being stopped.
        """
        return self._change(people.CANCEL)

    def requeue(self) -> Changed:
        """
        Give this failed or cancelled job fresh attempts, available now.

        What is returned is true if the job was changed, and false if its status is not one that the verb takes.

        Raises `JobBusy` at once when another transaction holds the row, or after half a second when one is
        about to take the job's key, and `JobKeyHeld` when a live job has that key. The caller's own
        transaction stays usable. The object itself is not refreshed.
        """
        return self._change(people.REQUEUE)

    def _change(self, verb: people.Verb) -> Changed:
        # Not using(), which returns a queryset: this verb is the manager's.
        return type(self).objects.db_manager(self._state.db).change_one(verb, self.pk)


class JobAttempt(models.Model):
    """An attempt that did not succeed. Rows are only added; the attempts of successful jobs leave none."""

    id = models.BigAutoField(_("id"), primary_key=True)
    # The unique constraint below is the index that this key needs.
    job = models.ForeignKey(Job, models.CASCADE, db_index=False, related_name="failed_attempts", verbose_name=_("job"))
    claim_version = models.BigIntegerField(_("claim version"))
    attempt = models.IntegerField(_("attempt"), help_text=_("Its number since the job was enqueued or requeued."))
    outcome = models.CharField(_("outcome"), max_length=16, choices=AttemptOutcome)
    counted = models.BooleanField(
        _("counted"), help_text=_("Whether it counts towards the job's max attempts; otherwise it was refunded.")
    )
    error_class = models.CharField(_("error class"), max_length=255)
    fingerprint = models.CharField(
        _("fingerprint"), max_length=32, help_text=_("Equal for errors that probably have one cause.")
    )
    message = models.TextField(_("message"))
    traceback = models.TextField(_("traceback"))
    worker = models.CharField(_("worker"), max_length=255)
    started_at = models.DateTimeField(_("started at"))
    ended_at = models.DateTimeField(_("ended at"))

    class Meta:
        db_table = "django_pgqueue_jobattempt"
        verbose_name = _("failed attempt")
        verbose_name_plural = _("failed attempts")
        default_permissions = ("view",)
        constraints = [models.UniqueConstraint(fields=["job", "claim_version"], name="pgqueue_attempt_claim")]

    def __str__(self) -> str:
        return f"{self.job_id}:{self.claim_version} {self.outcome}"


class Worker(models.Model):
    """A worker as it last reported itself, for people and monitoring to look at. No job depends on these rows."""

    id = models.BigAutoField(_("id"), primary_key=True)
    name = models.CharField(_("name"), max_length=255)
    hostname = models.CharField(_("host"), max_length=255)
    process_id = models.IntegerField(_("process id"))
    # What code asks about; NULL of a worker of an earlier release, which did not say.
    backend = models.CharField(_("backend"), max_length=128, null=True, blank=True)  # noqa: DJ001
    queues = models.TextField(_("queues"))
    serves = models.JSONField(_("served queues"), null=True, blank=True)
    concurrency = models.IntegerField(_("concurrency"), help_text=_("How many jobs it runs at the same time."))
    started_at = models.DateTimeField(_("started at"), db_default=ClockTimestamp())
    seen_at = models.DateTimeField(_("last seen at"), db_default=ClockTimestamp())
    turned_at = models.DateTimeField(
        _("last turn at"),
        null=True,
        blank=True,
        help_text=_("When the slowest of its control loops last did its work with the database."),
    )

    class Meta:
        db_table = "django_pgqueue_worker"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ("view",)
        constraints = [models.UniqueConstraint(fields=["name"], name="pgqueue_worker_name")]

    def __str__(self) -> str:
        return self.name
