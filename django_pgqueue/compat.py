"""
Django's Tasks framework under one name: ``django.tasks`` where Django has it (6.0 and later), the
``django-tasks`` backport on Django 5.2. Nothing else in the package knows that there are two.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from django.dispatch import Signal

if TYPE_CHECKING or find_spec("django.tasks") is not None:
    from django.tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskError
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist, TaskResultMismatch
    from django.tasks.signals import (
        task_enqueued,
        task_finished,
        task_started,
    )

    _FRAMEWORK = "django.tasks"
elif find_spec("django_tasks") is not None:
    from django_tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskError
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
    from django_tasks.signals import (
        task_enqueued,
        task_finished,
        task_started,
    )

    _FRAMEWORK = "django_tasks"
else:
    raise ImportError(
        "This Django has no Tasks framework. Install its backport: pip install 'django-pgqueue-jobs[django52]'"
    )

_SIGNALS = import_module(f"{_FRAMEWORK}.signals")
_OWN_RECEIVERS = frozenset(id(value) for value in vars(_SIGNALS).values() if callable(value))

__all__ = [
    "BaseTaskBackend",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultMismatch",
    "TaskResultStatus",
    "is_heard",
    "is_received",
    "load_framework",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]


def is_received(signal: Signal) -> bool:
    """Whether *signal* has receivers beside the framework's own, which logs it."""
    receivers = signal.receivers
    return bool(receivers) and not (len(receivers) == 1 and receivers[0][0][0] in _OWN_RECEIVERS)


def is_heard(signal: Signal, level: int) -> bool:
    """Whether *signal* has any effect: it is received, or the framework logs it at *level*."""
    return is_received(signal) or (bool(signal.receivers) and _SIGNALS.logger.isEnabledFor(level))


def load_framework() -> None:
    """Import the framework's system check and signal receivers, which nothing else may have imported yet."""
    import_module(f"{_FRAMEWORK}.checks")
    import_module(f"{_FRAMEWORK}.signals")
