"""Settings of the test suite: DATABASE_URL where given, else the embedded server of the example project."""

import os
import sys
from pathlib import Path

import environ

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "example_project"))  # for embedded_pg, also in the workers that tests start
env = environ.Env()

database_url = os.environ.get("DATABASE_URL")
if not database_url:
    import embedded_pg

    database_url = embedded_pg.url(ROOT / ".postgres-test", fast=True)

DATABASES = {
    "default": {**env.db_url_config(database_url), "ATOMIC_REQUESTS": False},
    # A second alias, with a database of its own.
    "other": {**env.db_url_config(database_url), "TEST": {"NAME": "test_pgqueue_other"}},
}
# A worker that a test starts works on the database of that test.
if test_database := os.environ.get("TEST_DATABASE"):
    DATABASES["default"]["NAME"] = test_database
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
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "tests.urls"
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
    import django.tasks  # noqa: F401
except ImportError:  # Django 5.2: the backport has the same backends
    for _backend in ("immediate", "dummy"):
        TASKS[_backend]["BACKEND"] = TASKS[_backend]["BACKEND"].replace("django.tasks", "django_tasks")

if "CONN_MAX_AGE" in os.environ:
    DATABASES["default"]["CONN_MAX_AGE"] = int(os.environ["CONN_MAX_AGE"])
if "POOL" in os.environ:
    DATABASES["default"].setdefault("OPTIONS", {})["pool"] = {"min_size": 1, "max_size": 4}
DEBUG = "DEBUG" in os.environ

# Options of the worker that a test starts.
TASKS["default"]["OPTIONS"] = {
    name: float(os.environ[name]) for name in ("LEASE_SECONDS", "POLL_SECONDS") if name in os.environ
}

if os.environ.get("BREAK_CHILD") and sys.argv[0].endswith("child.py"):
    os._exit(11)
