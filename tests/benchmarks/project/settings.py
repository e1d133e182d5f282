"""Settings of the project; the environment says which system it uses and where its database is."""

import json
import os

from psycopg.conninfo import conninfo_to_dict

SYSTEM = os.environ["BENCH_SYSTEM"]
OPTIONS = json.loads(os.environ.get("BENCH_OPTIONS", "{}"))
_place = conninfo_to_dict(os.environ["BENCH_DSN"])

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _place.get("dbname"),
        "USER": _place.get("user", ""),
        "PASSWORD": _place.get("password", ""),
        "HOST": _place.get("host", ""),
        "PORT": _place.get("port", ""),
        "CONN_MAX_AGE": 600,  # without it, some systems spend most of their time on connections
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.contenttypes", "tests.benchmarks.project"]
SECRET_KEY = "benchmarks have no secrets"
USE_TZ = True

if SYSTEM == "django_pgqueue":
    INSTALLED_APPS += ["django_pgqueue"]
    TASKS = {
        "default": {
            "BACKEND": "django_pgqueue.PgQueueBackend",
            "OPTIONS": {"RETENTION_SECONDS": None, **OPTIONS.get("backend", {})},
        }
    }
elif SYSTEM == "django-tasks-db":
    INSTALLED_APPS += ["django_tasks_db"]
    TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}

elif SYSTEM == "django-ox":
    INSTALLED_APPS += ["django_ox"]
    TASKS = {"default": {"BACKEND": "django_ox.backend.OxBackend"}}
elif SYSTEM == "django-q2":
    INSTALLED_APPS += ["django_q"]
    Q_CLUSTER = {
        "name": "benchmark",
        "orm": "default",
        "workers": OPTIONS.get("workers", 1),
        "queue_limit": 200,
        "bulk": OPTIONS.get("bulk", 1),
        "timeout": 60,
        "retry": 600,
        "save_limit": 0,
        "recycle": 1_000_000,
        "catch_up": False,
        "log_level": "WARNING",
        "max_attempts": 1,
    }

# Django logs the start and the end of each task at INFO. Only the variant that is about that leaves it on.
if OPTIONS.get("logging") != "default":
    LOGGING = {
        "version": 1,
        "disable_existing_loggers": False,
        "root": {"level": "WARNING"},
        "loggers": {
            name: {"level": "WARNING"} for name in ("django.tasks", "django_tasks", "django_tasks_db", "django_ox")
        },
    }
