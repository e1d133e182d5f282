"""
Which lines of a traceback are about the project's own code: people look for those first.

Decided when a traceback is shown, from its text alone: it may come from a machine where paths are other ones.
A frame is the project's when its file is neither under ``site-packages`` or ``dist-packages``, nor in Python's
library, nor ours. A traceback that was cut, or is of a group of errors, is read like any other.
"""

import re
import sysconfig
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

FRAME = re.compile(r'(?P<margin>[ |+]*)File "(?P<file>[^"]+)", line \d+')
LIBRARY = re.compile(r"(^|/)(site-packages|dist-packages|lib(64)?/python\d(\.\d+)?|python\d+\.zip)/")
LIBRARY_ROOTS = (f"{sysconfig.get_path('stdlib')}/", f"{Path(__file__).resolve().parent.parent}/", "<frozen ")


class Part(NamedTuple):
    """Successive lines of a traceback. *is_own* says whether they are about frames of the project."""

    text: str
    is_own: bool


def parts(traceback: str) -> list[Part]:
    """Cut *traceback* where frames of the project begin and end; joined, the texts are what it was."""
    lines = _lines(traceback.splitlines(keepends=True))
    return [
        Part("".join(line for line, _is_own in group), is_own) for is_own, group in groupby(lines, lambda pair: pair[1])
    ]


def is_own_file(path: str) -> bool:
    path = path.replace("\\", "/")
    return not (LIBRARY.search(path) or path.startswith(LIBRARY_ROOTS))


def _lines(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield each line with whether it is about a frame of the project: its place, and what is set in below it."""
    is_own, deeper = False, None
    for line in lines:
        if frame := FRAME.match(line):
            is_own, deeper = is_own_file(frame["file"]), f"{frame['margin']}  "
        elif deeper is None or not line.startswith(deeper):
            is_own, deeper = False, None
        yield line, is_own
