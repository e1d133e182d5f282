"""A PostgreSQL server that is there to be killed. It is a child of this process, so that its end can be waited for."""

import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import embedded_pg
import psycopg

PATIENCE_SECONDS = 60
FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT


class Server:
    """
    *programs* is the folder of PostgreSQL's programs, ``None`` for those of an installed wheel. It takes as many
    *connections* at once, and has these *settings* besides.
    """

    def __init__(
        self, directory: Path, programs: Path | None, connections: int = 300, settings: Mapping[str, str] | None = None
    ) -> None:
        self._settings = {"max_connections": str(connections), **(settings or {})}
        self._log = directory / "server.log"
        self._user = self._lesser_user()
        uid, gid = self._user.get("user", os.geteuid()), self._user.get("group", os.getegid())
        self._programs = programs or embedded_pg.programs_for(directory, uid, gid)
        home = directory / "server"
        home.mkdir(mode=0o700)
        os.chown(home, uid, gid)
        self._data = home / "data"
        self.port = free_port()
        self._call("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def outside(self) -> str:
        """The way to the server that no fault but its own death touches, for psycopg."""
        return f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres application_name=outside"

    def start(self) -> None:
        """Return once it answers, after a recovery if need be."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [
                    str(self._programs / "postgres"),
                    *("-D", str(self._data), "-p", str(self.port), "-c", "listen_addresses=127.0.0.1"),
                    *("-c", "unix_socket_directories=", "-c", "log_line_prefix=%m %p %a "),
                    *(part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")),
                ],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for us
                **self._user,
            )
        self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"The server does not answer:\n{self._log.read_text()[-3000:]}") from error
                time.sleep(0.05)

    def stop(self, how: signal.Signals = FAST) -> None:
        """Return once it is gone; *how* is FAST or IMMEDIATE."""
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def connect(self) -> psycopg.Connection:
        """A connection from outside, in autocommit, that waits for no lock."""
        options = "-c lock_timeout=500ms -c default_transaction_read_only=off"
        return psycopg.connect(self.outside, autocommit=True, connect_timeout=5, options=options)

    def fetch(self, statement: str, parameters: Any = None) -> list[tuple]:
        """Run one statement from outside and return its rows."""
        with self.connect() as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def _call(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._programs / program), *arguments], cwd="/", capture_output=True, text=True, **self._user
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")

    @staticmethod
    def _lesser_user() -> dict[str, Any]:
        """PostgreSQL refuses to run as root."""
        if os.geteuid() != 0:
            return {}
        uid, gid = pwd.getpwnam("nobody")[2:4]
        return {"user": uid, "group": gid, "extra_groups": []}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
