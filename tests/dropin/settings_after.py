from common_settings import *  # noqa: F403
from common_settings import INSTALLED_APPS, OTHER_BACKENDS

INSTALLED_APPS = [*INSTALLED_APPS, "django_pgqueue"]

OPTIONS = {"MAX_ATTEMPTS": 1}
TASKS = {
    "default": {"BACKEND": "django_pgqueue.PgQueueBackend", "QUEUES": ["default", "email"], "OPTIONS": OPTIONS},
    "reports": {"BACKEND": "django_pgqueue.PgQueueBackend", "QUEUES": ["reports"], "OPTIONS": OPTIONS},
    **OTHER_BACKENDS,
}
