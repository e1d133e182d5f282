"""
Projects of other people: a directory of their own, a database of their own, commands as they type them.

The one of docs/quickstart.md is made from that page: every command is run, every file written.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from django.db import connections

from .documents import ROOT, Block, blocks
from .helpers import second_connection, sql

PATIENCE_SECONDS = 120


class Project:
    """
    A directory in which commands run. *environment* is added to what the machine has, *programs* is the
    directory in which python is found.
    """

    def __init__(
        self, directory: Path, environment: Mapping[str, str], programs: Path = Path(sys.executable).parent
    ) -> None:
        self.directory = directory
        foreign = ("DATABASE_URL", "DJANGO_SETTINGS_MODULE", "PYTHONPATH", "TEST_DATABASE")
        self._environment = {name: value for name, value in os.environ.items() if name not in foreign}
        self._environment |= environment
        self._environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def run(self, *command: str, input: str | None = None) -> str:
        """Run *command* to its end, which must be an orderly one, and return what it printed."""
        ended = subprocess.run(
            command,
            cwd=self.directory,
            env=self._environment,
            input=input or "",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert ended.returncode == 0, f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}"
        return ended.stdout


@contextmanager
def new_database(suffix: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A new database on the server of the tests: its name, and the environment in which libpq finds the server."""
    settings = connections["default"].settings_dict
    name = f"{settings['NAME']}_{suffix}"
    values = {
        "PGHOST": settings["OPTIONS"].get("host") or settings["HOST"],
        "PGPORT": settings["PORT"],
        "PGUSER": settings["USER"],
        "PGPASSWORD": settings["PASSWORD"],
    }
    with second_connection() as connection:
        sql(connection, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        sql(connection, f'CREATE DATABASE "{name}"')
        try:
            yield name, {variable: str(value) for variable, value in values.items() if value}
        finally:
            sql(connection, f'DROP DATABASE "{name}" WITH (FORCE)')


# What is done before: there is an environment, and a database.
DONE_ALREADY = ("python3 -m venv ", ". ", "pip ", "createdb ")
RUN_EXAMPLES = """
import doctest, sys
import django
django.setup()
test = doctest.DocTestParser().get_doctest(sys.stdin.read(), {}, sys.argv[1], sys.argv[1], 0)
raise SystemExit(doctest.DocTestRunner().run(test).failed)
"""


def follow_quickstart(directory: Path, programs: Path = Path(sys.executable).parent, **environment: str) -> Project:
    """Do all that docs/quickstart.md says, in *directory*; return the project."""
    with new_database("quickstart") as (name, server):
        settings = {"DJANGO_SETTINGS_MODULE": "mysite.settings"}
        project = Project(directory, {**server, **settings, **environment}, programs)
        for block in blocks(ROOT / "docs" / "quickstart.md", "sh", "python", "pycon"):
            _follow(block, project, name)
        return project


def _follow(block: Block, project: Project, database: str) -> None:
    if block.language == "sh":
        for command in block.text.splitlines():
            if not command.startswith(DONE_ALREADY):
                project.run("bash", "-c", command)
    elif block.language == "pycon":
        project.run("python", "-c", RUN_EXAMPLES, block.place, input=block.text)
    else:
        assert block.file_name, f"{block.place} names no file"
        first_line, text = block.text.split("\n", 1)
        with (project.directory / block.file_name).open("a" if first_line.endswith("at the end") else "w") as file:
            file.write(text.replace('"mysite"', f'"{database}"'))
