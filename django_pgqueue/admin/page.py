"""What the page of one job shows beyond its columns: what happened when, each attempt, JSON that people can read."""

import json
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.utils import timezone
from django.utils.formats import date_format, number_format, time_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, pgettext

from ..models import Job, JobAttempt
from ..states import Status
from . import frames

SHOWN_CHARS = 20_000  # of one JSON value
SHOWN_ATTEMPTS = 25  # each may bring a traceback of 64,000 characters


class TimelineEvent(NamedTuple):
    label: str
    time: str


class ShownAttempt(NamedTuple):
    """One attempt, as its row of the page says it. *worker*, *ended* and others are empty where unknown."""

    number: int
    outcome: str
    style: str
    counted: str
    error_class: str
    message: str
    worker: str
    started: str
    ended: str
    duration: str
    traceback: list[frames.Part]


def timeline(job: Job) -> list[TimelineEvent]:
    """Return what has happened to *job* and when, in the order of the clock; the lease last, as it is to come."""
    happened = [
        (job.created_at, gettext("Created")),
        (job.available_at, gettext("Available")),
        (job.started_at, gettext("First attempt started")),
        (job.claimed_at, gettext("Last claimed")),
        (job.finished_at, gettext("Finished")),
    ]
    # sorted() keeps the order of equal moments
    events = sorted(((moment, label) for moment, label in happened if moment is not None), key=lambda pair: pair[0])
    if job.lease_until is not None:
        events.append((job.lease_until, gettext("Lease ends, unless renewed")))
    return [TimelineEvent(label, time_text(moment)) for moment, label in events]


def attempts(job: Job) -> tuple[list[ShownAttempt], bool]:
    """Return the newest attempts of *job*, newest first, and whether these are all."""
    rows = JobAttempt.objects.using(job._state.db).filter(job_id=job.pk).order_by("-claim_version")
    failed = list(rows[: SHOWN_ATTEMPTS + 1])
    shown = [*_unrecorded_attempt(job), *map(_failed_attempt, failed[:SHOWN_ATTEMPTS])]
    return shown, len(failed) <= SHOWN_ATTEMPTS


def _unrecorded_attempt(job: Job) -> list[ShownAttempt]:
    """Return the attempt that runs, or that succeeded: it has no row of its own."""
    if job.status not in (Status.RUNNING, Status.DONE) or not job.attempts or job.claimed_at is None:
        return []
    is_running = job.status == Status.RUNNING
    return [
        ShownAttempt(
            number=job.attempts,
            outcome=pgettext("attempt outcome", "running") if is_running else pgettext("attempt outcome", "succeeded"),
            style=job.status,
            counted=gettext("counted"),
            error_class="",
            message="",
            worker=job.claimed_by or "",
            started=time_text(job.claimed_at),
            ended=time_text(job.finished_at) if job.finished_at else "",
            duration=duration_text(job.finished_at - job.claimed_at) if job.finished_at else "",
            traceback=[],
        )
    ]


def _failed_attempt(attempt: JobAttempt) -> ShownAttempt:
    return ShownAttempt(
        number=attempt.attempt,
        outcome=attempt.get_outcome_display(),
        style="failed" if attempt.counted else "refunded",
        counted=gettext("counted") if attempt.counted else gettext("refunded"),
        error_class=attempt.error_class,
        message=attempt.message,
        worker=attempt.worker,
        started=time_text(attempt.started_at),
        ended=time_text(attempt.ended_at),
        duration=duration_text(attempt.ended_at - attempt.started_at),
        traceback=frames.parts(attempt.traceback),
    )


def json_text(value: Any) -> SafeString:
    """Return *value* as indented JSON, or the beginning of it with a sentence that says so."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # What scrolls must be reachable by keyboard.
    shown = format_html('<pre class="pgqueue-text" tabindex="0">{}</pre>', text[:SHOWN_CHARS])
    if len(text) <= SHOWN_CHARS:
        return shown
    note = gettext("Shown are the first %(shown)s of %(all)s characters.") % {
        "shown": number_format(SHOWN_CHARS, force_grouping=True),
        "all": number_format(len(text), force_grouping=True),
    }
    return format_html('{}<p class="pgqueue-note">{}</p>', shown, note)


def time_text(moment: datetime) -> SafeString:
    """Return *moment* in the current time zone, which is named, to the second; the title has the rest."""
    if timezone.is_naive(moment):
        moment = timezone.make_aware(moment, timezone.get_default_timezone())
    local = timezone.localtime(moment)
    exact = local.isoformat()
    # Django's formats of a time of day leave out the seconds in English. The time and its zone stay on one line.
    time_and_zone = f"{time_format(local.time(), 'H:i:s')}\N{NO-BREAK SPACE}{local.tzname()}"
    text = f"{date_format(local, 'SHORT_DATE_FORMAT')} {time_and_zone}"
    return format_html('<time datetime="{}" title="{}">{}</time>', exact, exact, text)


def duration_text(length: timedelta) -> str:
    seconds = length.total_seconds()
    if seconds < 60:
        return gettext("%(seconds)s s") % {"seconds": number_format(seconds, 3)}
    return str(timedelta(seconds=round(seconds)))
