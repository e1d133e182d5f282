"""PostgreSQL servers of a test's own, which may be stopped, from the programs of the server that the suite uses."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .workers import ROOT


class Server:
    """Reached by a Unix socket in *folder*. `url` is that of its only database."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.folder = folder
        self.url = f"postgres://postgres@/postgres?host={folder}"
        self._programs = programs
        self._data = folder / "data"

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder}"
        options += " -c fsync=off -c max_prepared_transactions=2"
        self._control("-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, mode: str) -> None:
        self._control("-m", mode, "stop")

    def copy(self, folder: Path) -> "Server":
        """Another server with a copy of what this one, stopped, holds."""
        _give_away(folder)
        shutil.copytree(self._data, folder / "data")
        for path in (folder / "data", *(folder / "data").rglob("*")):
            _give_away(path)
        return Server(self._programs, folder)

    def _control(self, *arguments: str) -> None:
        _run(self._programs / "pg_ctl", "-w", "-s", "-D", self._data, *arguments)


@contextmanager
def servers(programs: Path, count: int) -> Iterator[list[Server]]:
    """Run *count* servers with the tables of the test's project; stopped and deleted in the end."""
    folders = [Path(tempfile.mkdtemp(prefix="pgqueue-server-")) for _ in range(count)]
    started: list[Server] = []
    try:
        first = Server(programs, folders[0])
        _give_away(folders[0])
        locale = ("-E", "UTF8", "--no-locale")
        _run(programs / "initdb", "-D", folders[0] / "data", "-U", "postgres", "-A", "trust", *locale)
        first.start()
        started.append(first)
        _migrate(first)
        first.stop("fast")
        for server in (first, *(first.copy(folder) for folder in folders[1:])):
            server.start()
            started.append(server)
        yield started[1:]
    finally:
        for server in set(started):
            with suppress(AssertionError):  # a test that failed may have left it stopped
                server.stop("immediate")
        for folder in folders:
            shutil.rmtree(folder)


def _migrate(server: Server) -> None:
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "-v", "0"],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "DATABASE_URL": server.url},
        check=True,
    )


def _run(*command: Any) -> None:
    options: dict[str, Any] = {"cwd": "/", "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        uid, gid = pwd.getpwnam("nobody")[2:4]
        options |= {"user": uid, "group": gid, "extra_groups": []}
    with tempfile.TemporaryFile() as errors:  # not a pipe, which the server would keep open
        done = subprocess.run([os.fspath(part) for part in command], stderr=errors, **options)
        errors.seek(0)
        assert done.returncode == 0, errors.read().decode(errors="replace")


def _give_away(path: Path) -> None:
    if os.geteuid() == 0:
        uid, gid = pwd.getpwnam("nobody")[2:4]
        os.chown(path, uid, gid)
