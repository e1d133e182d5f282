"""A project moves from django-tasks-db by its settings alone: docs/from-django-tasks-db.md, run on a sample project."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from .documents import ROOT, blocks, column
from .projects import Project, new_database

GUIDE = ROOT / "docs" / "from-django-tasks-db.md"
SAMPLE = ROOT / "tests" / "dropin"
OLD_WORKER = "db_worker --batch --no-startup-delay --no-reload --queue-name *"
OUR_WORKER = "runworker --burst --concurrency 1"
ENQUEUE_TWO = """
import django; django.setup()
from datetime import timedelta
from django.utils import timezone
from library.tasks import lend_another, report
print(lend_another.enqueue("Emma").id, report.enqueue("May").id)
"""
STATUSES = """
import django; django.setup()
from django_tasks_db.models import DBTaskResult
print(*DBTaskResult.objects.order_by("enqueued_at").values_list("status", flat=True))
"""

pytestmark = pytest.mark.django_db
with_django_tasks_db = pytest.mark.skipif(
    find_spec("django_tasks_db") is None, reason="django-tasks-db is not installed"
)


def sample(settings, database):
    """The sample project with one of its settings modules, on *database*: a name and its environment."""
    name, environment = database
    here = {"DATABASE_NAME": name, "DJANGO_SETTINGS_MODULE": settings, "PYTHONPATH": str(ROOT)}
    return Project(SAMPLE, {**environment, **here})


def observe(settings, worker=None):
    """What the sample project sees of its tasks, run by *worker* for both backends; see tests/dropin/scenario.py."""
    workers = [worker, f"{worker} --backend reports"] if worker else []
    with new_database(settings) as database:
        project = sample(settings, database)
        project.run("python", "-m", "django", "migrate", "-v0")
        # What workers print goes to the same place; the last line is the scenario's.
        return json.loads(project.run("python", "scenario.py", *workers).splitlines()[-1])


@pytest.fixture(scope="module")
def observed(django_db_setup, django_db_blocker):
    """What the sample sees with our settings."""
    with django_db_blocker.unblock():
        return observe("settings_after", OUR_WORKER)


@with_django_tasks_db
def test_a_project_sees_no_difference_after_the_switch(observed):
    before = observe("settings_before", OLD_WORKER)

    assert observed == before


def test_tasks_come_to_what_the_framework_itself_makes_of_them(observed):
    immediate = observe("settings_immediate")

    assert len(immediate["after"]) > 15
    assert {name: observed["after"][name] for name in immediate["after"]} == immediate["after"]


@with_django_tasks_db
def test_the_old_worker_finishes_what_waits_in_the_old_table():
    with new_database("switch") as database:
        old, after, before = (sample(f"settings_{name}", database) for name in ("old", "after", "before"))
        old.run("python", "-m", "django", "migrate", "-v0")
        before.run("python", "-c", ENQUEUE_TWO)

        after.run("python", "-m", "django", *OUR_WORKER.split())
        untouched = old.run("python", "-c", STATUSES)
        for backend in ("default", "reports"):
            old.run("python", "-m", "django", *OLD_WORKER.split(), "--backend", backend)

        assert untouched.split() == ["READY"] * 2
        assert old.run("python", "-c", STATUSES).split() == ["SUCCESSFUL"] * 3  # one enqueued another


# ---- the guide


def tasks_setting(text):
    """The value of TASKS in *text*, names replaced by what they stand for, backends of Django's own left out."""
    values = {
        node.targets[0].id: ast.unparse(node.value) for node in ast.parse(text).body if isinstance(node, ast.Assign)
    }
    setting = values["TASKS"].replace(", **OTHER_BACKENDS", "").replace("**TASKS, ", "")
    return ast.literal_eval(setting.replace("'OPTIONS': OPTIONS", f"'OPTIONS': {values.get('OPTIONS')}"))


def test_the_guide_shows_the_settings_of_the_sample():
    shown = [tasks_setting(block.text) for block in blocks(GUIDE, "python") if "TASKS" in block.text]

    assert shown == [tasks_setting((SAMPLE / f"settings_{name}.py").read_text()) for name in ("before", "after", "old")]


@with_django_tasks_db
@pytest.mark.parametrize("command", ["db_worker", "prune_db_task_results"])
def test_the_guide_has_every_flag_of_the_old_commands(command):
    commands = Path(find_spec("django_tasks_db").submodule_search_locations[0], "management", "commands")

    flags = set(re.findall(r'"(--[\w-]+)"', (commands / f"{command}.py").read_text()))

    shown = {name for name in column(GUIDE, "Flags and settings", f"`{command}`") if name.startswith("--")}
    assert shown - {"--no-reload"} == flags
