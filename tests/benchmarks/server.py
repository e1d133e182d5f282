"""
The server that everything is measured on: private, durable, the same for all systems, reached by TCP.

A system's tables are made once, in a template; each run gets a fresh copy of it.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ..chaos.server import Server

# What a server for production would have, on a machine of this size; nothing that makes a commit less durable.
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
}
CONNECTIONS = 200


def find_programs() -> Path | None:
    """The folder of the machine's PostgreSQL, ``None`` if there is none."""
    found = shutil.which("initdb")
    candidates = [Path(found).resolve()] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    for initdb in candidates:
        if os.access(initdb, os.X_OK) and (initdb.parent / "postgres").exists():
            return initdb.parent
    return None


def find_pgbench(programs: Path | None) -> Path | None:
    """Where pgbench is; wheels have none."""
    if programs and (programs / "pgbench").exists():
        return programs / "pgbench"
    found = shutil.which("pgbench")
    return Path(found) if found else None


def has_library(programs: Path | None, name: str) -> bool:
    """Whether the server whose *programs* these are can load *name*; that of a wheel is not asked."""
    return programs is not None and any((programs.parent / "lib").rglob(f"{name}.so"))


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def private_server(directory: Path, programs: Path | None, settings: dict[str, str]) -> Iterator["Databases"]:
    """A server under *directory*, stopped in the end."""
    buffers = min(1 << 30, memory_bytes() // 4) >> 20
    server = Server(directory, programs, CONNECTIONS, {**SETTINGS, "shared_buffers": f"{buffers}MB", **settings})
    server.start()
    try:
        yield Databases({"host": "127.0.0.1", "port": str(server.port), "user": "postgres"}, directory)
    finally:
        server.stop()


class Databases:
    """The databases of the server that *conninfo* leads to. *directory* is for what belongs to its runs."""

    def __init__(self, conninfo: dict[str, str], directory: Path) -> None:
        self.conninfo = conninfo
        self.directory = directory
        self._templates: set[str] = set()
        self._made: set[str] = set()

    def dsn(self, name: str) -> str:
        """For libpq."""
        return make_conninfo(**{**self.conninfo, "dbname": name})

    def url(self, name: str) -> str:
        """For those that understand only URLs."""
        user, password = self.conninfo.get("user", ""), self.conninfo.get("password", "")
        login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
        return f"postgresql://{login}@{self.conninfo['host']}:{self.conninfo.get('port', '5432')}/{name}"

    def connect(self, name: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(self.dsn(name), autocommit=True)

    def value(self, name: str, statement: str, parameters: Any = None) -> Any:
        """Run one statement in database *name*; return the first value of its first row, if it has any."""
        with self.connect(name) as connection:
            cursor = connection.execute(statement, parameters)
            row = cursor.fetchone() if cursor.description else None
            return row[0] if row else None

    def fresh(self, label: str, install: Callable[[str], None]) -> str:
        """Return the name of a new database with what *install* puts into one; *label* names that."""
        name = f"pgqueue_bench_{label}".replace("-", "_")
        template = f"{name}_template"
        if template not in self._templates:
            self._create(template)
            install(template)
            self._templates.add(template)
        self._create(name, template)
        return name

    def drop_all(self) -> None:
        for name in self._made:
            self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _create(self, name: str, template: str = "template0") -> None:
        self._made.add(name)
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)
        self._execute("CREATE DATABASE {} TEMPLATE {}", name, template)

    def _execute(self, statement: str, *names: str) -> None:
        with self.connect() as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


class Pgbench:
    """The program, against one database."""

    def __init__(self, program: Path, databases: Databases, database: str) -> None:
        place = databases.conninfo
        self._command = [os.fspath(program), "-h", place["host"], "-U", place.get("user", "postgres"), "-n"]
        self._command += ["-p", place.get("port", "5432"), "-M", "prepared"]
        self._environment = {**os.environ, "PGPASSWORD": place.get("password", "")}
        self._database = database

    def run(self, script: Path, clients: int, *flags: str) -> tuple[float, int]:
        """Return transactions per second, without the time to connect, and their number. None may have failed."""
        done = subprocess.run(
            [*self._command, "-c", str(clients), "-j", str(min(clients, 2)), *flags, "-f", script, self._database],
            env=self._environment,
            capture_output=True,
            text=True,
        )
        if done.returncode or "aborted" in done.stderr:
            raise RuntimeError(f"pgbench failed:\n{done.stdout}{done.stderr}")
        said = {key.strip(): value for key, _, value in (line.partition(":") for line in done.stdout.splitlines())}
        [rate] = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("tps = ")]
        return float(rate), int(said["number of transactions actually processed"].partition("/")[0])
