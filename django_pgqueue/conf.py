"""
The options of a backend: ``TASKS[alias]["OPTIONS"]``, a closed list in upper case.

What enqueuers and workers must agree on is an option; what differs from process to process is a flag of
``runworker``. Nothing is read at import, and no other module reads settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from .backoff import Backoff, is_backoff
from .outcomes import storable_text

Notify = Literal["asleep", "always", "never"]  # for whom an enqueue rings

MAX_QUEUE_NAME_LENGTH = 128
MAX_TASK_PATH_LENGTH = 512
MAX_JOB_KEY_LENGTH = 255
MAX_ATTEMPTS_LIMIT = 2**31 - 2


@dataclass(frozen=True, slots=True)
class Options:
    """
    One backend's options, checked.

    *database* is the alias that holds the jobs, ``None`` to ask the database router. *backoff* is
    ``None`` for the default rule. *retention_seconds* is ``None`` to keep finished jobs for ever. *notify* is
    whether an enqueue notifies if a worker sleeps, in any case, or in none.
    """

    database: str | None = None
    max_attempts: int = 5
    backoff: Backoff | None = None
    lease_seconds: float = 60.0
    poll_seconds: float = 1.0
    retention_seconds: float | None = 7 * 24 * 3600.0
    notify: Notify = "asleep"

    @classmethod
    def parse(cls, alias: str, options: Mapping[str, Any]) -> "Options":
        """Return the options of backend *alias*; raises ``ImproperlyConfigured`` naming every mistake."""
        if mistakes := problems(options):
            raise ImproperlyConfigured(f"TASKS[{alias!r}]['OPTIONS']: {' '.join(mistakes)}")
        values = {name.lower(): value for name, value in options.items()}
        if isinstance(values.get("backoff"), str):
            values["backoff"] = import_string(values["backoff"])
        return cls(**values)


def problems(options: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each mistake in *options*, none if they are right."""
    if not isinstance(options, Mapping):
        return [f"The options must be a dictionary, not {options!r}."]
    known = [field.name.upper() for field in fields(Options)]
    found = []
    for name, value in options.items():
        if name not in known:
            close = get_close_matches(str(name).upper(), known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"The options are {', '.join(known)}."
            found.append(f"Unknown option {name!r}. {hint}")
        elif sentence := _problem(name, value):
            found.append(sentence)
    return found


def _problem(name: str, value: Any) -> str | None:
    match name:
        case "DATABASE" if value is not None and (not isinstance(value, str) or not value):
            return f"'DATABASE' must be an alias of DATABASES, not {value!r}."
        case "MAX_ATTEMPTS" if not is_attempt_count(value):
            return f"'MAX_ATTEMPTS' must be a whole number of at least 1, not {value!r}."
        case "BACKOFF":
            return _backoff_problem(value)
        case "LEASE_SECONDS" if not _is_number(value) or not 1 <= value <= 86_400:
            return f"'LEASE_SECONDS' must be a number from 1 to 86400, not {value!r}."
        case "POLL_SECONDS" if not _is_number(value) or not 0.01 <= value <= 3_600:
            return f"'POLL_SECONDS' must be a number from 0.01 to 3600, not {value!r}."
        case "RETENTION_SECONDS" if value is not None and not (_is_number(value) and 0 <= value <= 3_000_000_000):
            return f"'RETENTION_SECONDS' must be a number from 0 to 3000000000, or None to keep jobs, not {value!r}."
        case "NOTIFY" if value not in get_args(Notify):
            return f"'NOTIFY' must be 'asleep', 'always' or 'never', not {value!r}."
    return None


def _backoff_problem(value: Any) -> str | None:
    rule = value
    if isinstance(value, str):
        try:
            rule = import_string(value)
        except Exception as error:  # the module may raise whatever it likes
            return f"'BACKOFF' names {value!r}, which cannot be imported: {error}."
    if rule is not None and not is_backoff(rule):
        return f"'BACKOFF' must be seconds, a timedelta, a callable that is not async, or its path, not {value!r}."
    return None


def is_attempt_count(value: object) -> bool:
    """Whether *value* can be a number of attempts: a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_ATTEMPTS_LIMIT


def is_queue_name(value: object) -> bool:
    """
    Whether *value* can be a queue's name: text of 1 to MAX_QUEUE_NAME_LENGTH characters that can be stored.

    ``*`` is none: to ``runworker`` it means all queues.
    """
    if not isinstance(value, str) or value == "*":
        return False
    return 1 <= len(value) <= MAX_QUEUE_NAME_LENGTH and storable_text(value) == value


def is_job_key(value: object) -> bool:
    """Whether *value* can be a job's key: text of 1 to MAX_JOB_KEY_LENGTH characters that can be stored."""
    return isinstance(value, str) and 1 <= len(value) <= MAX_JOB_KEY_LENGTH and storable_text(value) == value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def uses_time_zones() -> bool:
    """Whether datetimes of this project carry a time zone."""
    return settings.USE_TZ


def has_settings_module() -> bool:
    """Whether another process can have the same settings; those of ``settings.configure()`` it cannot."""
    return bool(getattr(settings, "SETTINGS_MODULE", None))
