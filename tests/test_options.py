from dataclasses import FrozenInstanceError
from datetime import timedelta
from decimal import Decimal

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_pgqueue.backoff import default_delay
from django_pgqueue.compat import task_backends
from django_pgqueue.conf import Options, problems

from .helpers import backend


async def asynchronous(error, task_result):
    return 1


def test_without_options_the_defaults_apply():
    assert Options.parse("default", {}) == Options(
        database=None,
        max_attempts=5,
        backoff=None,
        lease_seconds=60,
        poll_seconds=1,
        retention_seconds=7 * 24 * 3600,
        notify="asleep",
    )


def test_every_option_can_be_set():
    options = Options.parse(
        "default",
        {
            "DATABASE": "other",
            "MAX_ATTEMPTS": 1,
            "BACKOFF": timedelta(minutes=1),
            "LEASE_SECONDS": 2.5,
            "POLL_SECONDS": 0.2,
            "RETENTION_SECONDS": 0,
            "NOTIFY": "never",
        },
    )

    assert options == Options("other", 1, timedelta(minutes=1), 2.5, 0.2, 0, "never")


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(FrozenInstanceError):
        Options().max_attempts = 7


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("django_pgqueue.backoff.default_delay", default_delay),
        ("django_pgqueue.backoff.LONGEST_DELAY_SECONDS", 3600.0),
    ],
)
def test_the_backoff_may_be_a_dotted_path(path, rule):
    assert Options.parse("default", {"BACKOFF": path}).backoff == rule


VALID = [
    ("DATABASE", None),
    ("BACKOFF", None),
    ("BACKOFF", 0),
    ("LEASE_SECONDS", 1),
    ("LEASE_SECONDS", 86_400),
    ("POLL_SECONDS", 0.01),
    ("POLL_SECONDS", 3_600),
    ("RETENTION_SECONDS", None),
    ("RETENTION_SECONDS", 0.5),
    ("NOTIFY", "always"),
    ("MAX_ATTEMPTS", 2**31 - 2),
]


@pytest.mark.parametrize(("name", "value"), VALID)
def test_a_value_at_its_bounds_is_right(name, value):
    assert problems({name: value}) == []


NOT_A_NUMBER = ["60", True, None, float("nan"), float("inf"), -1, timedelta(1), Decimal(5), [5], 10**400]

WRONG = [
    *[("DATABASE", value) for value in (5, b"other", "", ["other"])],
    *[("MAX_ATTEMPTS", value) for value in (0, 1.5, 2**31, *NOT_A_NUMBER)],
    *[("LEASE_SECONDS", value) for value in (0, 0.5, 86_401, *NOT_A_NUMBER)],
    *[("POLL_SECONDS", value) for value in (0, 0.001, 3_601, *NOT_A_NUMBER)],
    *[("RETENTION_SECONDS", value) for value in NOT_A_NUMBER if value is not None],
    *[("NOTIFY", value) for value in ("sometimes", "ASLEEP", "", None, True, False, 1, ["never"], {"never"})],
    *[("BACKOFF", value) for value in (-1, timedelta(-1), True, float("nan"), [15], b"15", asynchronous)],
    *[("BACKOFF", path) for path in ("", "15", "nowhere.rule", "json.nothing", "json.__name__", f"{__name__}.WRONG")],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: f"{value!r:.30}")
def test_a_wrong_value_is_named_with_its_option(name, value):
    [sentence] = problems({name: value})

    assert sentence.startswith(f"'{name}' ")
    assert repr(value) in sentence
    assert sentence.endswith(".")


def test_a_backoff_whose_module_is_broken_is_a_wrong_value(tmp_path, monkeypatch):
    (tmp_path / "broken_rules.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)

    [sentence] = problems({"BACKOFF": "broken_rules.rule"})

    assert sentence == "'BACKOFF' names 'broken_rules.rule', which cannot be imported: division by zero."


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LEASE_SECOND", "LEASE_SECONDS"),
        ("max_attempts", "MAX_ATTEMPTS"),
        ("MAX_ATTEMPT", "MAX_ATTEMPTS"),
        ("RETENTION", "RETENTION_SECONDS"),
        ("database", "DATABASE"),
        ("BACK_OFF", "BACKOFF"),
    ],
)
def test_an_option_that_is_misspelt_is_refused_with_the_one_that_was_meant(name, meant):
    assert problems({name: 5}) == [f"Unknown option '{name}'. Did you mean '{meant}'?"]


@pytest.mark.parametrize("name", ["CONCURRENCY", "x", "", 5, None])
def test_an_option_like_no_other_is_refused_with_the_list_of_them(name):
    assert problems({name: 5}) == [
        f"Unknown option {name!r}. "
        "The options are DATABASE, MAX_ATTEMPTS, BACKOFF, LEASE_SECONDS, POLL_SECONDS, RETENTION_SECONDS, NOTIFY."
    ]


@pytest.mark.parametrize("options", [None, [], "MAX_ATTEMPTS", 5])
def test_options_that_are_no_dictionary_are_refused(options):
    assert problems(options) == [f"The options must be a dictionary, not {options!r}."]


def test_every_mistake_is_named_at_once(settings):
    settings.TASKS = {"default": backend(MAX_ATTEMPTS=0, LEASE_SECOND=5, POLL_SECONDS="1")}

    with pytest.raises(ImproperlyConfigured) as refusal:
        task_backends["default"].settings  # noqa: B018

    assert str(refusal.value) == (
        "TASKS['default']['OPTIONS']: 'MAX_ATTEMPTS' must be a whole number of at least 1, not 0. "
        "Unknown option 'LEASE_SECOND'. Did you mean 'LEASE_SECONDS'? "
        "'POLL_SECONDS' must be a number from 0.01 to 3600, not '1'."
    )
