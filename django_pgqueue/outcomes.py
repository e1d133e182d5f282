"""
How a claim ends, as plain data: what a worker hands to ``settle`` and what is kept of an error.

    Succeeded   the task returned; its result as JSON text, or nothing
    Retried     the attempt failed, another follows after a delay
    Snoozed     the task asked to be run later; the attempt is refunded
    Failed      the attempt failed and was the last: a dead letter
    Released    the claim is given back and the attempt refunded

Every text in an ErrorRecord can be stored by PostgreSQL whatever the exception was made of: without NUL
and lone surrogates, and bounded in size.
"""

import traceback
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

MAX_MESSAGE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 64_000
MAX_FRAMES = 60
MAX_LINE_CHARS = 4_000
MAX_CLASS_CHARS = 255


class Claim(NamedTuple):
    """The right to run one job. *version* is the row's ``claim_version`` since the claim."""

    job_id: int
    version: int


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """What is kept of an exception. *fingerprint* is equal for errors that probably have one cause."""

    class_path: str
    message: str
    traceback: str
    fingerprint: str

    @classmethod
    def of(cls, error: BaseException) -> "ErrorRecord":
        """Describe *error*, however large, deep or hostile it is; never raises for what it contains."""
        class_path = class_path_of(type(error))
        return cls(
            class_path=class_path,
            message=_bounded(_message(error), MAX_MESSAGE_CHARS),
            traceback=_bounded(_traceback(error), MAX_TRACEBACK_CHARS),
            fingerprint=_fingerprint(class_path, error),
        )

    @classmethod
    def plain(cls, error_class: type[BaseException], message: str) -> "ErrorRecord":
        """Describe an error that was never raised, such as the death of a process."""
        class_path = class_path_of(error_class)
        text = _bounded(message, MAX_MESSAGE_CHARS)
        return cls(class_path, text, f"{class_path}: {text}\n", _digest(class_path))

    @property
    def summary(self) -> str:
        """One line: the class's name and the message."""
        message = " ".join(self.message.split())
        return f"{self.class_path.rpartition('.')[2]}: {message}" if message else self.class_path


@dataclass(frozen=True, slots=True)
class Succeeded:
    claim: Claim
    result: str | None = None  # JSON text


@dataclass(frozen=True, slots=True)
class Retried:
    """*ending* is how the attempt is told apart from others that failed: ``error`` or ``timeout``."""

    claim: Claim
    delay_seconds: float
    error: ErrorRecord
    ending: str = "error"


@dataclass(frozen=True, slots=True)
class Snoozed:
    claim: Claim
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """*ending*: see `Retried`."""

    claim: Claim
    error: ErrorRecord
    ending: str = "error"


@dataclass(frozen=True, slots=True)
class Released:
    """
    *started*: whether the task had begun. Then the interruption is recorded, and refunded only so often.

    *reason*, if it is not empty, is what the job shows as its last error.
    """

    claim: Claim
    delay_seconds: float = 0.0
    started: bool = False
    reason: str = ""


Outcome = Succeeded | Retried | Snoozed | Failed | Released


def storable_text(text: str) -> str:
    r"""Return *text* with NUL as ``\x00`` and lone surrogates as ``\udcff``, which PostgreSQL would refuse."""
    # Of a subclass, the text itself, not what its methods make of it.
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


def class_path_of(error_class: type[BaseException]) -> str:
    """Return the dotted path of *error_class*, as ``TaskError.exception_class`` imports it."""
    return storable_text(f"{error_class.__module__}.{error_class.__qualname__}")[:MAX_CLASS_CHARS]


def _message(error: BaseException) -> str:
    try:
        return str.__str__(str(error))
    except BaseException as broken:  # a hostile __str__ must not cost the record
        return f"<str() of this error raised {type(broken).__name__}>"


def _traceback(error: BaseException) -> str:
    """The traceback, causes first, of which each line, the number of frames and the whole are bounded."""
    try:
        report = traceback.TracebackException(
            type(error),
            error,
            error.__traceback__,
            limit=-MAX_FRAMES,
            compact=True,
            max_group_width=5,
            max_group_depth=3,
        )
        text = "".join(
            _clip(line, MAX_LINE_CHARS) + ("\n" if len(line) > MAX_LINE_CHARS else "") for line in report.format()
        )
    except Exception as broken:
        text = f"{class_path_of(type(error))}\n<its traceback could not be formatted: {type(broken).__name__}>\n"
    return text


def _bounded(text: str, limit: int) -> str:
    """Make *text* storable and no longer than *limit*: cut it before it is escaped, and if need be after."""
    return _clip(storable_text(_clip(text, limit)), limit)


def _clip(text: str, limit: int) -> str:
    """Keep the beginning and the end of *text*: a traceback tells most at its end."""
    if len(text) <= limit:
        return text
    note = f"\n[… {len(text) - limit} characters left out …]\n"
    head = limit // 4
    return text[:head] + note + text[len(text) - (limit - head - len(note)) :]


def _fingerprint(class_path: str, error: BaseException) -> str:
    """Digest the class and the innermost function, without line numbers, which move with every edit."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    place = f"{step.tb_frame.f_globals.get('__name__')}:{step.tb_frame.f_code.co_name}" if step else ""
    return _digest(f"{class_path}@{place}")


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
