"""PgBouncer before the test's server, for workers to connect through."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from django.db import connections

from .helpers import wait_until

_CONFIGURATION = """
[databases]
* = {server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {pool_size}
max_client_conn = 500
ignore_startup_parameters = extra_float_digits
logfile = {folder}/log
pidfile = {folder}/pid
"""


@contextmanager
def pgbouncer(mode: str, *, pool_size: int = 20) -> Iterator[str]:
    """Run PgBouncer in pool mode *mode*; yields the URL of a database "postgres" through it."""
    user, server = _server()
    folder = Path(tempfile.mkdtemp(prefix="pgqueue-pgbouncer-"))
    own_port = _free_port()
    (folder / "ini").write_text(
        _CONFIGURATION.format(server=server, own_port=own_port, mode=mode, pool_size=pool_size, folder=folder)
    )
    # It refuses to run as root.
    other_user: dict[str, Any] = {}
    if os.geteuid() == 0:
        uid, gid = pwd.getpwnam("nobody")[2:4]
        other_user = {"user": uid, "group": gid, "extra_groups": []}
        for path in (folder, folder / "ini"):
            os.chown(path, uid, gid)
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "install PgBouncer"
    process = subprocess.Popen([program, "-q", str(folder / "ini")], cwd="/", **other_user)
    url = f"postgres://{quote(user, safe='')}@127.0.0.1:{own_port}/postgres"
    try:
        wait_until(lambda: _is_ready(url, process, folder / "log"), "PgBouncer")
        yield url
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder)


def _server() -> tuple[str, str]:
    """The user of the test's database, and how PgBouncer reaches its server."""
    parameters = connections["default"].get_connection_params()
    chosen = {name: parameters[name] for name in ("host", "port", "user", "password") if parameters.get(name)}
    with psycopg.connect(dbname="postgres", **chosen) as connection:
        info = connection.info
        server = f"host={info.host} port={info.port} user={info.user}"
        return info.user, f"{server} password={info.password}" if info.password else server


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _is_ready(url: str, process: subprocess.Popen, log: Path) -> bool:
    assert process.poll() is None, f"PgBouncer has ended:\n{log.read_text() if log.exists() else ''}"
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True
