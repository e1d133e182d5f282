from common_settings import *  # noqa: F403
from common_settings import INSTALLED_APPS, OTHER_BACKENDS

INSTALLED_APPS = [*INSTALLED_APPS, "django_tasks_db"]

TASKS = {
    "default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default", "email"]},
    "reports": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["reports"]},
    **OTHER_BACKENDS,
}
