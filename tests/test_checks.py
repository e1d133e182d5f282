"""One test at least for each id; what a check finds is read through Django's own ``run_checks``."""

import types

import psycopg
import pytest
from django.core.checks import run_checks
from django.core.management import call_command, get_commands
from django.core.management.base import SystemCheckError
from django.db import connections
from django.db.backends.dummy.base import DatabaseWrapper as NoDatabase

from .helpers import backend, database_alias


def found():
    """What our checks find, by id."""
    return {message.id.removeprefix("django_pgqueue."): message for message in run_checks() if "pgqueue" in message.id}


def test_a_project_that_is_right_has_nothing_found():
    assert found() == {}


def test_a_project_of_other_backends_has_nothing_found(settings):
    settings.TASKS = {"default": settings.TASKS["dummy"]}

    assert found() == {}


# ---- E001, E002: the backend's settings


def test_a_wrong_option_is_found(settings):
    settings.TASKS = {"default": backend(), "second": backend("second", LEASE_SECOND=5, MAX_ATTEMPTS=0)}

    messages = [message.msg for message in run_checks() if message.id == "django_pgqueue.E001"]

    assert messages == [
        "TASKS['second']['OPTIONS']: Unknown option 'LEASE_SECOND'. Did you mean 'LEASE_SECONDS'?",
        "TASKS['second']['OPTIONS']: 'MAX_ATTEMPTS' must be a whole number of at least 1, not 0.",
    ]


def test_options_that_are_no_dictionary_are_found(settings):
    settings.TASKS = {"default": {**backend(), "OPTIONS": None}}

    assert set(found()) == {"E001"}


def test_a_wrong_option_stops_a_command(settings):
    settings.TASKS = {"default": backend(MAX_ATTEMPT=3)}

    with pytest.raises(SystemCheckError, match=r"Did you mean 'MAX_ATTEMPTS'\?"):
        call_command("check")


@pytest.mark.parametrize("name", ["", "q" * 129, "a\x00b", "\ud800", 5, None, b"bytes", ("tuple",)], ids=ascii)
def test_a_queue_name_that_cannot_be_stored_is_found(settings, name):
    settings.TASKS = {"default": backend("right", name)}

    messages = found()

    assert set(messages) == {"E002"}
    assert messages["E002"].msg == f"TASKS['default']['QUEUES']: {name!r:.80} cannot be a queue's name."
    assert "1 to 128 characters" in messages["E002"].hint


# ---- E003, E004, E005: where the jobs are


def test_a_database_that_does_not_exist_is_found(settings):
    settings.TASKS = {"default": backend(DATABASE="othr")}

    messages = found()

    assert set(messages) == {"E003"}
    assert messages["E003"].msg == "TASKS['default']: the database 'othr' is not in DATABASES."


def test_a_database_that_is_not_postgresql_is_found(settings, monkeypatch):
    settings.TASKS = {"default": backend(DATABASE="elsewhere")}
    monkeypatch.setitem(connections.settings, "elsewhere", {"ENGINE": "django.db.backends.dummy"})
    connections["elsewhere"] = NoDatabase(connections["default"].settings_dict, "elsewhere")

    messages = found()

    del connections["elsewhere"]
    assert set(messages) == {"E003"}
    assert "jobs need PostgreSQL" in messages["E003"].msg


def test_psycopg2_is_found(settings):
    settings.TASKS = {"default": backend(DATABASE="old_driver")}
    with database_alias("old_driver") as connection:
        connection.Database = types.ModuleType("psycopg2")  # as the driver's name would be

        messages = found()

    assert set(messages) == {"E004"}
    assert messages["E004"].msg == "TASKS['default']: Django uses psycopg2 for the database 'old_driver'."
    assert "Install psycopg 3" in messages["E004"].hint


class NoJobsHere:
    """A router that keeps the tables away."""

    def allow_migrate(self, db, app_label, **hints):
        return False if app_label == "django_pgqueue" and db == "default" else None

    def __repr__(self):
        return "<NoJobsHere>"


def test_a_router_that_keeps_the_tables_away_is_found(settings):
    settings.DATABASE_ROUTERS = [NoJobsHere()]

    messages = found()

    assert set(messages) == {"E005"}
    assert messages["E005"].msg == "TASKS['default']: the jobs' tables would not be created on the database 'default'."
    assert "<NoJobsHere>" in messages["E005"].hint


class JobsOnOther:
    """A router that sends jobs, and their tables, to a second database."""

    def db_for_write(self, model, **hints):
        return "other" if model._meta.app_label == "django_pgqueue" else None

    def allow_migrate(self, db, app_label, **hints):
        return (db == "other") if app_label == "django_pgqueue" else None


def test_a_router_that_sends_all_of_it_elsewhere_is_right(settings):
    settings.DATABASE_ROUTERS = [JobsOnOther()]

    assert found() == {}


def test_an_option_that_contradicts_the_router_is_found(settings):
    settings.DATABASE_ROUTERS = [JobsOnOther()]
    settings.TASKS = {"default": backend(DATABASE="default")}

    assert set(found()) == {"E005"}


# ---- E006: backends side by side


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (["a", "b", "c"], ["c", "b", "d"], "b, c"),
        ([], ["a"], "any queue"),
        (["a"], [], "any queue"),
        ([], [], "any queue"),
    ],
)
def test_backends_that_share_queues_on_one_database_are_found(settings, one, other, names):
    settings.TASKS = {"default": backend(*one), "second": backend(*other)}

    messages = found()

    assert set(messages) == {"E006"}
    assert messages["E006"].msg == f"TASKS['default'] and TASKS['second'] share queues on one database: {names}."


def test_every_pair_that_shares_is_found(settings):
    settings.TASKS = {"default": backend("a"), "second": backend("a"), "third": backend("b", "a")}

    pairs = [message.msg for message in run_checks() if message.id == "django_pgqueue.E006"]

    assert len(pairs) == 3


@pytest.mark.parametrize("settled", [backend("b"), backend("a", DATABASE="other")], ids=["queues", "database"])
def test_backends_apart_are_right(settings, settled):
    settings.TASKS = {"default": backend("a"), "second": settled}

    assert found() == {}


def test_backends_that_cannot_be_compared_do_not_stop_the_checks(settings):
    settings.TASKS = {"default": backend("a", 5), "second": backend("a", 5), "third": backend("a", WRONG=1)}

    assert set(found()) == {"E001", "E002", "E006"}


# ---- W001: isolation


@pytest.mark.parametrize(
    "options",
    [
        {"isolation_level": psycopg.IsolationLevel.REPEATABLE_READ},
        {"isolation_level": psycopg.IsolationLevel.SERIALIZABLE},
        {"isolation_level": 4},
        {"options": "-c default_transaction_isolation=serializable"},
        {"options": "-c search_path=app -c default_transaction_isolation=repeatable\\ read"},
        {"options": "-cdefault_transaction_isolation=Serializable"},
        {"options": "--default-transaction-isolation=serializable"},
    ],
    ids=repr,
)
def test_an_isolation_level_above_read_committed_is_warned_of(settings, options):
    """R09"""
    settings.TASKS = {"default": backend(DATABASE="strict")}
    with database_alias("strict", **options):
        messages = found()

    assert set(messages) == {"W001"}
    assert "40001" in messages["W001"].hint


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"isolation_level": psycopg.IsolationLevel.READ_COMMITTED},
        {"isolation_level": psycopg.IsolationLevel.READ_UNCOMMITTED},
        {"isolation_level": None},
        {"isolation_level": "serializable"},  # Django refuses it when it connects
        {"options": "-c default_transaction_isolation=read\\ committed -c application_name=serializable"},
    ],
    ids=repr,
)
def test_read_committed_is_right(settings, options):
    settings.TASKS = {"default": backend(DATABASE="relaxed")}
    with database_alias("relaxed", **options):
        assert found() == {}


# ---- W002: the command


@pytest.fixture
def other_app_with_runworker(tmp_path, monkeypatch, settings):
    """An app with a command of the same name, listed first."""
    commands = tmp_path / "impostor" / "management" / "commands"
    commands.mkdir(parents=True)
    for folder in (commands, commands.parent, commands.parent.parent):
        (folder / "__init__.py").touch()
    (commands / "runworker.py").write_text("from django.core.management.base import BaseCommand as Command\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    get_commands.cache_clear()


def test_another_apps_runworker_is_warned_of(other_app_with_runworker, settings):
    settings.INSTALLED_APPS = ["impostor", *settings.INSTALLED_APPS]
    get_commands.cache_clear()

    messages = found()

    assert set(messages) == {"W002"}
    assert messages["W002"].msg == "The command 'runworker' is the one of 'impostor'."
    assert "pgqueue_worker" in messages["W002"].hint


def test_another_apps_runworker_behind_ours_is_right(other_app_with_runworker, settings):
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "impostor"]
    get_commands.cache_clear()

    assert found() == {}
