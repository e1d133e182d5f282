"""What README.md and docs/ say: their code runs, and the reference names what the code has, no more and no less."""

import ast
import importlib
import inspect
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from django.core.management import BaseCommand, get_commands, load_command_class
from django.db import connection

import django_pgqueue
from django_pgqueue.conf import Options
from django_pgqueue.managers import JobQuerySet
from django_pgqueue.models import Job, JobAttempt, Worker
from django_pgqueue.states import AttemptOutcome, Status
from django_pgqueue.tasks import Context, Task, task
from django_pgqueue.testing import run_jobs
from django_pgqueue.worker import supervisor

from .documents import DOCUMENTS, ROOT, Block, all_blocks, code, column, section, table
from .projects import follow_quickstart

PACKAGE = Path(django_pgqueue.__file__).parent
REFERENCE = ROOT / "docs" / "reference.md"
COMMANDS = sorted(name for name, app in get_commands().items() if app == "django_pgqueue")
SHARED_FLAGS = {action.dest for action in BaseCommand().create_parser("", "")._actions}


def ids(block: Block) -> str:
    return block.place


# ---- every block


@pytest.mark.parametrize("block", all_blocks("python"), ids=ids)
def test_python_blocks_compile_and_import_what_there_is(block):
    tree = ast.parse(block.text)

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "django_pgqueue":
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "django_pgqueue":
                    importlib.import_module(alias.name)


@pytest.mark.django_db
@pytest.mark.parametrize("block", [block for block in all_blocks("sql") if "-- session" not in block.text], ids=ids)
def test_sql_blocks_run(block):
    with connection.cursor() as cursor:
        cursor.execute(block.text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text())

    for name, anchor in links:
        target = path.parent / name if name else path
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


# ---- the reference


def first_column(title: str) -> dict[str, list[str]]:
    """The names in the first column under a heading of the reference, each with its row."""
    return {re.split(r"[ (]", code(cells[0])[0])[0]: cells for cells in table(section(REFERENCE, title))}


def public_methods(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")}


def shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def test_it_has_every_option_with_its_default():
    rows = first_column("Options")

    assert {name: code(cells[1])[0] for name, cells in rows.items()} == {
        field.name.upper(): f"{field.default:.0f}" if isinstance(field.default, float) else str(field.default)
        for field in fields(Options)
    }


def test_it_has_every_setting_of_a_task_with_its_default():
    rows = column(REFERENCE, "Tasks", "`@task(...)`")
    parameters = inspect.signature(task).parameters.values()

    assert {name: code(cells[1])[0] for name, cells in rows.items()} == {
        parameter.name: shown(parameter.default)
        for parameter in parameters
        if parameter.kind == inspect.Parameter.KEYWORD_ONLY
    }


def test_it_has_every_setting_of_using():
    parameters = set(inspect.signature(Task.using).parameters) - {"self"}

    assert set(column(REFERENCE, "Tasks", "`.using(...)`")) == parameters


def test_it_has_every_method_of_a_task():
    inherited = {"get_result", "aget_result"}

    assert set(column(REFERENCE, "Tasks", "method of a task")) == public_methods(Task) | inherited


def test_it_has_every_attribute_of_a_context():
    assert set(column(REFERENCE, "Tasks", "of a `Context`")) == {"attempt", "task_result"} | {
        name for name, value in vars(Context).items() if isinstance(value, property)
    }


def test_it_has_every_exception():
    bases = {"Exception", "BaseException", "InvalidTask", "PgQueueError", "Interruption"}
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    classes = re.findall(r"^class (\w+)\((.*)\):", text, re.MULTILINE)
    exceptions = {
        name for name, parents in classes if bases & set(re.findall(r"\w+", parents)) and not name.startswith("_")
    }

    assert {name.rpartition(".")[2] for name in first_column("Exceptions")} == exceptions


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "pgqueue_worker"])
def test_it_has_every_flag_with_its_default(name):
    flags = {
        flag: action
        for action in _actions(load_command_class("django_pgqueue", name).create_parser("manage.py", name))
        for flag in action.option_strings
        if flag.startswith("--")
    }
    rows = {flag: cells for flag, cells in first_column(name).items() if flag.startswith("--")}

    assert set(rows) == set(flags)
    said = {flag: code(cells[1]) for flag, cells in rows.items()}
    assert {flag: said[flag] for flag in said if said[flag]} == {
        flag: [shown(action.default).strip('"')]
        for flag, action in flags.items()
        if action.default not in (None, False, [])
    }


def _actions(parser):
    """Yield the actions of *parser* and of its subcommands that not every command of Django has."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for subparser in action.choices.values():
                yield from _actions(subparser)
        elif action.dest not in SHARED_FLAGS:
            yield action


def test_it_has_every_exit_code():
    codes = {str(value) for name, value in vars(supervisor).items() if name.startswith("EXIT_")}

    codes.add("2")  # Python's own, of what argparse cannot read
    assert {name for name in first_column("runworker") if name.isdigit()} == codes


def test_it_has_every_verb():
    assert set(column(REFERENCE, "Verbs", "of a queryset")) == public_methods(JobQuerySet)
    assert set(column(REFERENCE, "Verbs", "of one job")) == public_methods(Job)


def test_it_has_every_status_and_outcome():
    statuses = column(REFERENCE, "Statuses", "status")

    assert list(statuses) == Status.values
    assert set(column(REFERENCE, "Statuses", "outcome")) == set(AttemptOutcome.values)


def test_it_has_every_check():
    text = (PACKAGE / "checks.py").read_text()

    assert list(first_column("System checks")) == sorted(
        f"django_pgqueue.{number}" for number in set(re.findall(r"{PREFIX}\.([EW]\d+)", text))
    )


def test_it_has_every_permission():
    models = (Job, JobAttempt, Worker)

    assert set(first_column("Permissions")) == {
        f"django_pgqueue.{name}"
        for model in models
        for name in [
            *(f"{action}_{model._meta.model_name}" for action in model._meta.default_permissions),
            *(name for name, _ in model._meta.permissions),
        ]
    }


def test_it_has_the_signature_of_run_jobs():
    said = ast.parse(code(section(REFERENCE, "In tests"))[0], mode="eval").body

    assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in said.keywords} == {
        name: parameter.default for name, parameter in inspect.signature(run_jobs).parameters.items()
    }


def test_it_has_every_verb_of_the_command():
    parser = load_command_class("django_pgqueue", "pgqueue").create_parser("manage.py", "pgqueue")
    [verbs] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]

    assert set(column(REFERENCE, "pgqueue", "verb")) == set(verbs)


# ---- the rest


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(name for extra in project["project"]["optional-dependencies"].values() for name in extra),
    ]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements} - {project["project"]["name"]}
    text = (ROOT / "docs" / "dependencies.md").read_text()

    assert {name for name in names if f"`{name}" not in text} == set()


# ---- the quickstart


@pytest.mark.django_db
def test_a_stranger_can_follow_the_quickstart(tmp_path):
    follow_quickstart(tmp_path, PYTHONPATH=str(ROOT))
