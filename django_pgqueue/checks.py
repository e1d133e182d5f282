"""
System checks: what can be seen to be wrong before anything runs.

    E001  an unknown option, or a wrong value, in TASKS[alias]["OPTIONS"]
    E002  a queue name that cannot be stored
    E003  the jobs' database is unknown or not PostgreSQL
    E004  the driver of the jobs' database is psycopg2
    E005  the router keeps the tables away from the jobs' database
    E006  two backends share a queue on one database
    W001  the jobs' database uses a stricter isolation level than Read Committed
    W002  another app's ``runworker`` command hides ours

E001 to E005 and W001 come through the backend, with Django's own check of TASKS.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.core.management import get_commands
from django.db import connections, router
from django.utils.connection import ConnectionDoesNotExist

from .compat import task_backends
from .conf import MAX_QUEUE_NAME_LENGTH, is_queue_name, problems

if TYPE_CHECKING:
    from .backend import PgQueueBackend

PREFIX = "django_pgqueue"


def check_backend(backend: "PgQueueBackend") -> list[CheckMessage]:
    """Return what is wrong with one backend's settings and its database."""
    where = f"TASKS[{backend.alias!r}]"
    found: list[CheckMessage] = [
        Error(f"{where}['OPTIONS']: {sentence}", id=f"{PREFIX}.E001") for sentence in problems(backend.options)
    ]
    for name in sorted(backend.queues, key=str):
        if not is_queue_name(name):
            found.append(
                Error(
                    f"{where}['QUEUES']: {name!r:.80} cannot be a queue's name.",
                    hint=f"Use text of 1 to {MAX_QUEUE_NAME_LENGTH} characters.",
                    id=f"{PREFIX}.E002",
                )
            )
    return found or _check_database(where, backend.database)


def _check_database(where: str, alias: str) -> list[CheckMessage]:
    from .models import Job

    try:
        connection: Any = connections[alias]
    except ConnectionDoesNotExist:
        return [
            Error(
                f"{where}: the database {alias!r} is not in DATABASES.",
                hint="Correct OPTIONS['DATABASE'].",
                id=f"{PREFIX}.E003",
            )
        ]
    if connection.vendor != "postgresql":
        return [
            Error(
                f"{where}: the database {alias!r} is {connection.display_name}; jobs need PostgreSQL.",
                hint="Set OPTIONS['DATABASE'], or route the app django_pgqueue to a PostgreSQL database.",
                id=f"{PREFIX}.E003",
            )
        ]
    found: list[CheckMessage] = []
    if connection.Database.__name__ != "psycopg":
        found.append(
            Error(
                f"{where}: Django uses psycopg2 for the database {alias!r}.",
                hint="Install psycopg 3 (pip install 'psycopg[binary]'); Django prefers it when both are there.",
                id=f"{PREFIX}.E004",
            )
        )
    if not router.allow_migrate_model(alias, Job):
        named = ", ".join(repr(entry) for entry in router.routers) or "none"
        found.append(
            Error(
                f"{where}: the jobs' tables would not be created on the database {alias!r}.",
                hint=f"Let allow_migrate() of the routers ({named}) accept it there, or set OPTIONS['DATABASE'].",
                id=f"{PREFIX}.E005",
            )
        )
    if _is_stricter_than_read_committed(connection):
        found.append(
            Warning(
                f"{where}: the database {alias!r} uses an isolation level above Read Committed.",
                hint="Workers use Read Committed all the same; verbs that you call may fail with SQLSTATE 40001.",
                id=f"{PREFIX}.W001",
            )
        )
    return found


def _is_stricter_than_read_committed(connection: Any) -> bool:
    options = connection.settings_dict.get("OPTIONS", {})
    level = options.get("isolation_level")
    if level is not None:
        # psycopg counts READ_UNCOMMITTED 1, READ_COMMITTED 2, REPEATABLE_READ 3, SERIALIZABLE 4. Django refuses others.
        return isinstance(level, int) and level > 2
    startup = str(options.get("options", "")).replace("-", "_").lower()
    return (
        "default_transaction_isolation=repeatable" in startup or "default_transaction_isolation=serializable" in startup
    )


@register
def check_queues_are_not_shared(app_configs: Any = None, **kwargs: Any) -> Iterable[CheckMessage]:
    """A job belongs to one backend, so two on the same database cannot have a queue in common."""
    seen: list[PgQueueBackend] = []
    for candidate in task_backends.all():
        if not getattr(candidate, "checks_calls", False) or problems(candidate.options):
            continue
        backend = cast("PgQueueBackend", candidate)  # whose module imports this one
        for other in seen:
            shared = backend.queues & other.queues if backend.queues and other.queues else {"any queue"}
            try:
                same_database = backend.database == other.database
            except ImproperlyConfigured:
                continue
            if shared and same_database:
                names = ", ".join(sorted(map(str, shared)))
                yield Error(
                    f"TASKS[{other.alias!r}] and TASKS[{backend.alias!r}] share queues on one database: {names}.",
                    hint="Give each backend queues of its own in QUEUES, or another database.",
                    id=f"{PREFIX}.E006",
                )
        seen.append(backend)


@register
def check_command_is_ours(app_configs: Any = None, **kwargs: Any) -> Iterable[CheckMessage]:
    """``channels`` and others ship a command of that name; the app listed first wins, silently."""
    owner = get_commands().get("runworker")
    if owner != PREFIX:
        yield Warning(
            f"The command 'runworker' is the one of {owner!r}.",
            hint="Start workers with 'manage.py pgqueue_worker', or list 'django_pgqueue' before it in INSTALLED_APPS.",
            id=f"{PREFIX}.W002",
        )
