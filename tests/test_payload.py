import datetime
import functools
import json
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from decimal import Decimal
from enum import Enum, IntEnum
from types import MappingProxyType
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group
from django.db import models
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy

from django_pgqueue.payload import MAX_DEPTH, MAX_JSON_BYTES, decode_call, encode_call, encode_result


def anything(*args, **kwargs):
    """A signature that every call fits."""


def order(number, *, note=""):
    """One with names."""


def with_keyword(number, *, size):
    """One whose keyword has no default."""


def with_context(context, number):
    """One that a worker gives a context."""


class Colour(models.TextChoices):
    RED = "red"


class Size(IntEnum):
    LARGE = 3


class Plain(Enum):
    ONE = 1


Pair = namedtuple("Pair", "left right")


def round_trip(*args, **kwargs):
    return decode_call(*encode_call(anything, False, args, kwargs))


def nested(levels, innermost="x"):
    value = innermost
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        2**63,
        -(2**9_000),
        0.1,
        -2.5e-300,
        "",
        "plain",
        "🐟 עברית \u202e \x01 \x7f \u2028 \ufffe \U0010ffff",
        [],
        {},
        [1, [2, [3]], {"a": None}],
        {"": 1, "🐟": {"b": [True]}},
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_what_json_knows_comes_back_with_equal_type_and_value(value):
    args, kwargs = round_trip(value, inside=[{"deeper": value}], name=value)

    assert args == [value]
    assert kwargs == {"inside": [{"deeper": value}], "name": value}
    assert type(args[0]) is type(value)


@pytest.mark.parametrize(
    ("value", "arrives_as"),
    [
        ((1, 2), [1, 2]),
        (Pair(1, (2,)), [1, [2]]),
        (range(3), [0, 1, 2]),
        (deque(["a"]), ["a"]),
        (UserList([1]), [1]),
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": (1,)}), {"a": [1]}),
        (UserDict(a=1), {"a": 1}),
        (b"caf\xc3\xa9", "café"),
        (bytearray(b"\x01\x02"), [1, 2]),
        (Colour.RED, "red"),
        (Size.LARGE, 3),
        (mark_safe("<b>"), "<b>"),
        ({Colour.RED: Colour.RED}, {"red": "red"}),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_what_django_makes_json_of_arrives_as_the_plain_type(value, arrives_as):
    args, _ = round_trip(value)

    assert args == [arrives_as]
    assert type(args[0]) is type(arrives_as)


UNKNOWN_TYPES = [
    uuid4(),
    Decimal("1.5"),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    datetime.date(2026, 1, 1),
    datetime.time(12),
    datetime.timedelta(1),
    {1, 2},
    frozenset(),
    Group(name="a row"),
    Group.objects.none(),
    Plain.ONE,
    1j,
    object(),
    (n for n in range(2)),
    {}.items(),
    gettext_lazy("lazy"),
    anything,
    ValueError("an error"),
]


@pytest.mark.parametrize("value", UNKNOWN_TYPES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "place", [lambda v: v, lambda v: [[v]], lambda v: {"key": (v,)}], ids=["itself", "in lists", "in a mapping"]
)
def test_a_type_that_json_does_not_know_is_refused_by_name(value, place):
    with pytest.raises(TypeError, match=rf"^Argument 'number' of order\(\) holds a .*{type(value).__name__}, which"):
        encode_call(order, False, [place(value)], {})
    with pytest.raises(TypeError, match=rf"^Argument 'note' of order\(\) holds a .*{type(value).__name__}, which"):
        encode_call(order, False, [1], {"note": place(value)})
    with pytest.raises(TypeError, match=rf"^The return value holds a .*{type(value).__name__}, which"):
        encode_result(place(value))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a\x00b", "NUL"),
        (b"a\x00b", "NUL"),
        ("\ud800", "surrogate"),
        ("\udcff", "surrogate"),
        ("\udc00\ud800", "surrogate"),
        (b"\xff", "not UTF-8"),
        (b"\xed\xa0\x80", "not UTF-8"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (2**10_001, "more than 10,000 bits"),
        ({"k\x00": 1}, "NUL"),
        ({"\ud800": 1}, "surrogate"),
        (nested(MAX_DEPTH + 1), "levels deep"),
        (nested(100_000), "levels deep"),
    ],
    ids=lambda value: f"{value!r:.20}" if not isinstance(value, list) else "deep",
)
def test_a_value_that_postgresql_cannot_keep_is_refused_by_name(value, reason):
    with pytest.raises(ValueError, match=rf"^Argument 'number' of order\(\) .*{reason}"):
        encode_call(order, False, [value], {})
    with pytest.raises(ValueError, match=rf"^Argument 'note' of order\(\) .*{reason}"):
        encode_call(order, False, [1], {"note": [value] if not isinstance(value, list) else value})
    with pytest.raises(ValueError, match=rf"^The return value .*{reason}"):
        encode_result(value)


@pytest.mark.parametrize("key", [1, None, True, 1.5, b"k", (1, 2), Plain.ONE, Size.LARGE], ids=repr)
def test_a_key_that_is_no_string_is_refused(key):
    with pytest.raises(TypeError, match=r"^Argument 'number' of order\(\) has the key .*must be strings"):
        encode_call(order, False, [{"outer": {key: 1}}], {})


def test_a_list_that_holds_itself_is_refused():
    endless: list = []
    endless += [endless, endless]

    with pytest.raises(ValueError, match="levels deep"):
        encode_call(order, False, [endless], {})


def test_values_up_to_the_deepest_level_are_kept():
    args, _ = round_trip(nested(MAX_DEPTH))

    assert args == [nested(MAX_DEPTH)]


def test_arguments_may_be_as_large_as_the_limit_and_no_larger():
    overhead = len('[""]{}')
    largest = "x" * (MAX_JSON_BYTES - overhead)

    encode_call(order, False, [largest], {})
    with pytest.raises(ValueError, match=r"arguments of order\(\) take 1,048,577 bytes .* more than the 1,048,576"):
        encode_call(order, False, [largest + "x"], {})


def test_the_size_is_that_of_utf_8():
    with pytest.raises(ValueError, match="bytes as JSON"):
        encode_call(order, False, ["🐟" * (MAX_JSON_BYTES // 4)], {})


def test_a_result_may_be_as_large_as_the_limit_and_no_larger():
    largest = "x" * (MAX_JSON_BYTES - len('""'))

    encode_result(largest)
    with pytest.raises(ValueError, match=r"return value takes 1,048,577 bytes .* more than the 1,048,576"):
        encode_result(largest + "x")


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        ([], {}, "missing a required argument: 'number'"),
        ([1, 2], {}, "too many positional arguments"),
        ([1], {"number": 2}, "multiple values for argument 'number'"),
        ([1], {"size": 2}, "unexpected keyword argument 'size'"),
    ],
)
def test_a_call_that_does_not_fit_the_signature_is_refused(args, kwargs, complaint):
    with pytest.raises(TypeError, match=rf"^order\(\) cannot be called like this: .*{complaint}"):
        encode_call(order, False, args, kwargs)


def test_keywords_that_must_be_given_are_asked_for():
    assert encode_call(with_keyword, False, [5], {"size": 1}) == ("[5]", '{"size": 1}')
    with pytest.raises(TypeError, match=r"missing a required .*argument: 'size'"):
        encode_call(with_keyword, False, [5], {})


def test_the_context_is_not_an_argument_of_the_call():
    assert encode_call(with_context, True, [5], {}) == ("[5]", "{}")
    with pytest.raises(TypeError, match="too many positional"):
        encode_call(with_context, True, [5, 6], {})
    with pytest.raises(TypeError, match="multiple values for argument 'context'"):
        encode_call(with_context, True, [5], {"context": 1})
    with pytest.raises(TypeError, match=r"^Argument 'number' "):
        encode_call(with_context, True, [object()], {})


def test_the_signature_is_that_of_the_function_that_will_be_called():
    @functools.wraps(order)
    def wrapper(*args, **kwargs):
        """Takes more than what it wraps."""

    assert encode_call(wrapper, False, [1, 2, 3], {"more": 4}) == ("[1, 2, 3]", '{"more": 4}')


def test_an_argument_without_a_name_is_called_by_its_number():
    with pytest.raises(TypeError, match=r"^Argument 2 of anything\(\) holds a set"):
        encode_call(anything, False, [1, set()], {})


@pytest.mark.parametrize("name", ["k\x00", "\ud800"], ids=ascii)
def test_a_keyword_that_is_not_text_is_refused(name):
    with pytest.raises(ValueError, match=r"^The name of an argument of anything\(\) holds"):
        encode_call(anything, False, [], {name: 1})


@pytest.mark.parametrize("name", ["self", "args", "kwargs", "function", "task", "context", "priority"])
def test_no_keyword_is_reserved(name):
    assert round_trip(**{name: 1}) == ([], {name: 1})


def test_a_result_of_none_is_nothing():
    assert encode_result(None) is None


@pytest.mark.parametrize("value", [0, "", [], {}, False])
def test_an_empty_result_is_a_result(value):
    assert json.loads(encode_result(value)) == value


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [("null", "{}"), ('"x"', "{}"), ('{"a": 1}', "{}"), ("[]", "[]"), ("[]", "null"), ("7", "{}"), ("[]", '"x"')],
)
def test_stored_texts_that_are_no_call_are_refused(args, kwargs):
    with pytest.raises(ValueError, match="stored arguments are not a call"):
        decode_call(args, kwargs)


@pytest.mark.parametrize("args", ["[" * 500 + "]" * 500, "[" * 200_000 + "]" * 200_000, "[" + "9" * 5_000 + "]"])
def test_stored_texts_that_nobody_could_have_enqueued_are_refused(args):
    with pytest.raises(ValueError):
        decode_call(args, "{}")
