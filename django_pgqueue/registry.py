"""
From a stored path to the task it names.

A row is data, never code: a path is followed only into modules of installed apps, and only to a decorated
task, so whoever can write a row cannot make a worker import a module of their choice. Enqueue follows the
same rule, so that an unreachable task fails where it is written.
"""

from importlib import import_module

from django.apps import apps
from django.core.signals import setting_changed
from django.dispatch import receiver

from .compat import InvalidTask, Task
from .exceptions import PgQueueError

_found: dict[str, Task] = {}


class UnknownTask(PgQueueError):
    """A stored path names no task that this process may run: deleted, renamed, or not deployed here yet."""


def find(task_path: str) -> Task:
    """
    Return the task at *task_path*, ``"module.function"``.

    Raises `UnknownTask`, saying why. An error inside the module while it is imported counts as that,
    with the error as its cause.
    """
    if (task := _found.get(task_path)) is not None:
        return task
    module_name, _, name = task_path.rpartition(".")
    if not module_name or apps.get_containing_app_config(module_name) is None:
        raise UnknownTask(f"{task_path!r} is not in a module of an installed app.")
    try:
        candidate = getattr(import_module(module_name), name, None)
    except (Exception, SystemExit) as error:
        raise UnknownTask(f"The module of {task_path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(candidate, Task):
        raise UnknownTask(
            f"{task_path!r} is not a task" + (" there." if candidate is None else f" but a {type(candidate).__name__}.")
        )
    _found[task_path] = candidate
    return candidate


def known(task_path: str) -> Task | None:
    """Return the task at *task_path* if it was found before."""
    return _found.get(task_path)


def check_reachable(task: Task) -> None:
    """Raise ``InvalidTask`` unless workers will find this very *task* under its path."""
    known = _found.get(task.module_path)
    if known is not None and known.func is task.func:
        return
    try:
        known = find(task.module_path)
    except UnknownTask as error:
        raise InvalidTask(f"No worker could run this task: {error}") from error
    if known.func is not task.func:
        raise InvalidTask(f"No worker could run this task: {task.module_path!r} is another task by now.")


@receiver(setting_changed)
def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == "INSTALLED_APPS":
        _found.clear()
