"""
A thread's database connections, as Django wraps them: one wrapper for each alias, connected or not.

Django looks wrappers up by alias and thread, which takes longer than many a job. What surrounds a job
wants all of them, each time, so a thread that runs jobs keeps them in a list. Other threads may read it, to
cancel a statement.
"""

import threading
from typing import Any

from django.db import connections
from django.db.backends.signals import connection_created
from django.dispatch import receiver

_here = threading.local()


def here() -> list[Any]:
    """Return the wrappers of the calling thread. One that is not among them is added when it connects."""
    try:
        return _here.wrappers
    except AttributeError:
        _here.wrappers = list(connections.all())
        return _here.wrappers


def replace(wrapper: Any) -> None:
    """Let Django make a new wrapper in the place of this one."""
    del connections[wrapper.alias]
    forget()


def forget() -> None:
    """Look up the calling thread's wrappers anew when they are asked for."""
    _here.__dict__.clear()


@receiver(connection_created)
def _add(connection: Any, **signal: Any) -> None:
    wrappers = getattr(_here, "wrappers", None)
    if wrappers is not None and connection not in wrappers:  # a task has replaced it
        wrappers.append(connection)
