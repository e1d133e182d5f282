"""Settings of the chaos: workers and producers reach the server as faults permit, the record of effects directly."""

import os

from .kinds import LEASE_SECONDS

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "postgres",
        "HOST": "127.0.0.1",
        "PORT": os.environ["CHAOS_PORT"],
        "OPTIONS": {"connect_timeout": 5},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django_pgqueue", "tests.chaos"]
SECRET_KEY = "chaos has no secrets"
TASKS = {
    "default": {
        "BACKEND": "django_pgqueue.PgQueueBackend",
        "OPTIONS": {
            "LEASE_SECONDS": LEASE_SECONDS,
            # So many that no job is failed by bad luck alone, and every row is there to be counted in the end.
            "MAX_ATTEMPTS": 1_000,
            "BACKOFF": 0.3,
            "RETENTION_SECONDS": None,
        },
    }
}
USE_TZ = True
