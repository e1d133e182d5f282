"""README.md and docs/ as a test reads them: fenced blocks, sections, the first column of a table."""

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w/]+\.py)\b")


class Block(NamedTuple):
    """A fenced block: where it begins, the language after the fence, the text without the fences."""

    place: str
    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The file that the first line names, as in ``# shop/tasks.py``."""
        found = FILE_NAME.match(self.text)
        return found[1] if found else None


def blocks(path: Path, *languages: str) -> list[Block]:
    """Return the fenced blocks of a document in their order, of these *languages* or of all."""
    text = path.read_text()
    return [
        Block(f"{path.name}:{text[: found.start()].count(chr(10)) + 1}", found["language"], dedent(found["text"]))
        for found in FENCE.finditer(text)
        if not languages or found["language"] in languages
    ]


def all_blocks(*languages: str) -> list[Block]:
    return [block for path in DOCUMENTS for block in blocks(path, *languages)]


def section(path: Path, title: str) -> str:
    """Return what stands under the heading *title*, up to the next heading of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}$(.*?)(?=^#{{1,2}} |\Z)", path.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{path.name} has no heading {title!r}"
    return found[2]


def table(text: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables in *text*, but for their heads."""
    for line in text.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and cells[0].startswith("`"):
            yield cells


def code(cell: str) -> list[str]:
    """Return what stands between backticks in *cell*."""
    return re.findall(r"`([^`]+)`", cell)


def column(path: Path, title: str, head: str) -> dict[str, list[str]]:
    """Return the names in the first column of the table that begins with *head* under *title*, each with its row."""
    part = section(path, title).partition(f"| {head} |")[2].partition("\n\n")[0]
    return {re.split(r"[ (]", name)[0]: cells for cells in table(part) for name in code(cells[0])}
