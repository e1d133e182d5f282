"""For the old worker alone, while it finishes what was enqueued before the switch."""

from settings_after import *  # noqa: F403
from settings_after import INSTALLED_APPS, TASKS

INSTALLED_APPS = [*INSTALLED_APPS, "django_tasks_db"]

TASKS = {
    **TASKS,
    "default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default", "email"]},
    "reports": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["reports"]},
}
