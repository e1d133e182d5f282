"""
Arguments and results between Python and ``jsonb``.

Django's rules for JSON apply (``django.utils.json.normalize_json``: mappings, sequences, ``bytes`` that
are UTF-8), and what those rules let through but PostgreSQL or JSON cannot keep is refused: NaN and
infinity, NUL, lone surrogates, keys that are not strings, numbers, depth and size beyond a limit. All
of it happens before any SQL, so that a caller's transaction survives.

What is accepted comes back equal, with two reservations. ``jsonb`` keeps numbers as decimals, so a float
of 1e16 or more comes back as an integer; and it keeps the members of a mapping in an order of its own.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

MAX_JSON_BYTES = 1_048_576
MAX_DEPTH = 100
MAX_INTEGER_BITS = 10_000  # Python refuses to print more than 4,300 digits

_CONTEXT = object()  # stands for the context argument when a call is only checked
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
SHORT_CHARS = 200  # in fewer, nothing is too deep, and no number too large

_decode = json.JSONDecoder().raw_decode
# Those first that most are: to ask an abstract class takes longer.
_MAPPINGS = (dict, Mapping)
_SEQUENCES = (list, tuple, Sequence)

_as_json = json.JSONEncoder(ensure_ascii=False).encode


def encode_call(
    function: Callable[..., Any], takes_context: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str]:
    """
    Return *args* and *kwargs* as JSON texts: an array and an object.

    Raises ``TypeError`` when the call does not fit *function*'s signature or a value's type cannot be
    stored, ``ValueError`` when the value itself cannot; the message names the argument.
    """
    call = _call_of(function, takes_context)
    if kwargs or not call.fewest <= len(args) <= call.most:
        call.check(args, kwargs)
    name = function.__qualname__
    array = [
        value if _is_plain(value) else _storable(value, f"Argument {call.name_of(place)} of {name}()")
        for place, value in enumerate(args)
    ]
    members = {
        _storable_text(key, f"The name of an argument of {name}()"): _storable(value, f"Argument {key!r} of {name}()")
        for key, value in kwargs.items()
    }
    texts = _as_json(array), _as_json(members) if members else "{}"
    if 4 * (len(texts[0]) + len(texts[1])) > MAX_JSON_BYTES:  # then it may be, for a character has at most 4 bytes
        size = len(texts[0].encode()) + len(texts[1].encode())
        if size > MAX_JSON_BYTES:
            raise ValueError(
                f"The arguments of {name}() take {size:,} bytes as JSON, more than the {MAX_JSON_BYTES:,} that a job "
                "may carry. Store the data elsewhere and pass its key."
            )
    return texts


def encode_result(value: Any) -> str | None:
    """
    Return a task's return value as JSON text, ``None`` for ``None``.

    Raises ``TypeError`` or ``ValueError`` as `encode_call` does.
    """
    if value is None:
        return None
    text = _as_json(_storable(value, "The return value"))
    # A character has at most 4 bytes.
    if 4 * len(text) > MAX_JSON_BYTES and (size := len(text.encode())) > MAX_JSON_BYTES:
        raise ValueError(
            f"The return value takes {size:,} bytes as JSON, more than the {MAX_JSON_BYTES:,} that a job may keep."
        )
    return text


def decode_call(args: str, kwargs: str) -> tuple[list[Any], dict[str, Any]]:
    """
    Return the arguments stored as the JSON texts *args* and *kwargs*.

    Raises ``ValueError`` when they are not an array and an object of values that could have been
    enqueued, as after an edit by hand.
    """
    if args == "[]" and kwargs == "{}":  # as many have
        return [], {}
    try:
        array, members = _from_json(args), _from_json(kwargs)
    except RecursionError:
        raise ValueError("The stored arguments are not a call: they are nested too deeply.") from None
    if len(args) + len(kwargs) < SHORT_CHARS and type(array) is list and type(members) is dict:
        return array, members
    return checked_call(array, members)


def checked_call(array: Any, members: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return *array* and *members*, arguments as a row has them; raises ``ValueError`` as `decode_call` does."""
    if not isinstance(array, list) or not isinstance(members, dict):
        raise ValueError(
            f"The stored arguments are not a call: args must be a JSON array and kwargs an object, "
            f"not {type(array).__name__} and {type(members).__name__}."
        )
    name = "A stored argument"
    return [_storable(value, name) for value in array], {key: _storable(value, name) for key, value in members.items()}


def _from_json(text: str) -> Any:
    if text[:1] in ("[", "{"):  # as the server prints an array or an object: without space around it
        value, end = _decode(text)
        if end == len(text):
            return value
    return json.loads(text)


class _Call:
    """
    How a function can be called, apart from its context.

    From *fewest* to *most* positional arguments, and no others, certainly fit; everything else `check` tells.
    """

    def __init__(self, function: Callable[..., Any], takes_context: bool) -> None:
        # The function that will be called, not the one that functools.wraps() says it stands for.
        self._signature = inspect.signature(function, follow_wrapped=False)
        self._function_name = function.__qualname__
        self._leading = (_CONTEXT,) if takes_context else ()
        parameters = self._signature.parameters.values()
        positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL][len(self._leading) :]
        self._names = [parameter.name for parameter in positional]
        self.fewest = sum(parameter.default is parameter.empty for parameter in positional)
        self.most = len(positional)
        if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
            self.most = -1

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` unless the function can be called with these arguments."""
        try:
            self._signature.bind(*self._leading, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._function_name}() cannot be called like this: {error}.") from None

    def name_of(self, place: int) -> str:
        """Return what the positional argument at *place* is called: its name in quotes, or its number."""
        return repr(self._names[place]) if place < len(self._names) else str(place + 1)


_call_of = lru_cache(maxsize=4096)(_Call)


def _is_plain(value: Any) -> bool:
    """Whether *value* is of the kinds that most arguments are, and can be stored as it is."""
    kind = type(value)
    if kind is int:
        return -(2**63) < value < 2**63
    if kind is str:
        return value.isascii() and "\x00" not in value
    return kind is bool or value is None


def _storable(value: Any, name: str, depth: int = 0) -> Any:
    if _is_plain(value):
        return value
    if isinstance(value, str):
        return _storable_text(value, name)
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(f"{name} holds an integer of more than {MAX_INTEGER_BITS:,} bits.")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} holds {value}, which JSON does not know.")
        return float(value)
    if depth >= MAX_DEPTH:
        raise ValueError(f"{name} is nested more than {MAX_DEPTH} levels deep.")
    if isinstance(value, bytes):
        try:
            return _storable_text(value.decode("utf-8"), name)
        except UnicodeDecodeError:
            raise ValueError(f"{name} holds bytes that are not UTF-8 text.") from None
    if isinstance(value, _MAPPINGS):
        return {_storable_key(key, name): _storable(member, name, depth + 1) for key, member in value.items()}
    if isinstance(value, _SEQUENCES):
        return [_storable(member, name, depth + 1) for member in value]
    raise TypeError(
        f"{name} holds a {type(value).__qualname__}, which cannot be stored as JSON. Pass a key or a string instead."
    )


def _storable_key(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{name} has the key {key!r}; the keys of a mapping must be strings.")
    return _storable_text(key, name)


def _storable_text(text: str, name: str) -> str:
    text = str.__str__(text)  # of a subclass, such as an enumeration's member, the text itself
    if "\x00" in text:
        raise ValueError(f"{name} holds a NUL character, which PostgreSQL cannot store.")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{name} holds a lone surrogate, which is not text.") from None
    return text
