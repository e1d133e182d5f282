"""What the settings of the sample project share, whichever backend runs its tasks."""

import os

DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["DATABASE_NAME"]}}
INSTALLED_APPS = ["library"]
SECRET_KEY = "dropin"
USE_TZ = True

try:
    import django.tasks  # noqa: F401
except ImportError:  # Django 5.2
    FRAMEWORK = "django_tasks"
else:
    FRAMEWORK = "django.tasks"

# Django's own two, which stay as they are.
OTHER_BACKENDS = {
    "immediate": {"BACKEND": f"{FRAMEWORK}.backends.immediate.ImmediateBackend"},
    "dummy": {"BACKEND": f"{FRAMEWORK}.backends.dummy.DummyBackend"},
}
