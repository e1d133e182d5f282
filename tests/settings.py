"""Settings of the test suite: DATABASE_URL where given, else the embedded server of the example project."""

import os
import sys
import time
from pathlib import Path

import django
import environ
from django.core.checks import register

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "example_project"))  # for embedded_pg, also in the workers that tests start
env = environ.Env()

database_url = os.environ.get("DATABASE_URL")
if not database_url:
    import embedded_pg

    # Two runs of the suite at the same time need a server each.
    database_url = embedded_pg.url(ROOT / os.environ.get("TEST_SERVER", ".postgres-test"), fast=True)

DATABASES = {
    "default": {**env.db_url_config(database_url), "ATOMIC_REQUESTS": False},
    # A second alias, with a database of its own.
    "other": {**env.db_url_config(database_url), "TEST": {"NAME": "test_pgqueue_other"}},
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_pgqueue",
    "tests.app",
]
LANGUAGE_CODE = os.environ.get("LANGUAGE_CODE", "en-us")
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
if django.VERSION >= (6, 0):
    MIDDLEWARE.insert(0, "django.middleware.csp.ContentSecurityPolicyMiddleware")
    SECURE_CSP = {"default-src": ["'self'"], "img-src": ["'self'", "data:"]}  # the admin's icons
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "tests.urls"
# A worker that a test starts works on the database of that test. Its processes need not import what makes pages, each
# time; those of the demo and the quickstart do.
if test_database := os.environ.get("TEST_DATABASE"):
    DATABASES["default"]["NAME"] = test_database
    INSTALLED_APPS = ["django_pgqueue", "tests.app"]
    del ROOT_URLCONF
SECRET_KEY = "tests"
STATIC_URL = "static/"
TASKS = {
    "default": {"BACKEND": "django_pgqueue.PgQueueBackend", "QUEUES": ["default", "email", "slow"]},
    "immediate": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend", "QUEUES": []},
    "dummy": {"BACKEND": "django.tasks.backends.dummy.DummyBackend", "QUEUES": []},
}
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
USE_TZ = True

try:
    import django.tasks
except ImportError:  # Django 5.2: the backport has the same backends
    for _backend in ("immediate", "dummy"):
        TASKS[_backend]["BACKEND"] = TASKS[_backend]["BACKEND"].replace("django.tasks", "django_tasks")

if "CONN_MAX_AGE" in os.environ:
    DATABASES["default"]["CONN_MAX_AGE"] = int(os.environ["CONN_MAX_AGE"])
DATABASES["default"]["CONN_HEALTH_CHECKS"] = "CONN_HEALTH_CHECKS" in os.environ
if "SERVER_SIDE_BINDING" in os.environ:
    DATABASES["default"].setdefault("OPTIONS", {})["server_side_binding"] = True
if "POOL" in os.environ:
    DATABASES["default"].setdefault("OPTIONS", {})["pool"] = {"min_size": 1, "max_size": 4}
DEBUG = "DEBUG" in os.environ
if "LOGGING_OF_A_PROJECT" in os.environ:
    # As many projects have it: a handler at the root, and, by default, existing loggers disabled.
    LOGGING = {
        "version": 1,
        "formatters": {"short": {"format": "project: %(levelname)s %(message)s"}},
        "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "short"}},
        "root": {"handlers": ["console"], "level": "INFO"},
    }

# Options of the worker that a test starts.
TASKS["default"]["OPTIONS"] = {
    name: float(os.environ[name]) for name in ("LEASE_SECONDS", "POLL_SECONDS", "BACKOFF") if name in os.environ
}

if os.environ.get("BREAK_CHILD") and sys.argv[0].endswith("entry.py"):
    os._exit(11)


def _stand_still(*args, **kwargs):
    """Say that we are here by a file, and wait until the test has removed it."""
    place = Path(os.environ["STAND_STILL"])
    place.touch()
    while place.exists():
        time.sleep(0.01)
    return []


# Where the start of a worker stands still: in Django's checks, or in the imports of its child.
if "STAND_STILL" in os.environ:
    if sys.argv[0].endswith("entry.py"):
        _stand_still()
    elif "STAND_STILL_IN_CHECKS" in os.environ:
        register(_stand_still)
