"""
A network that fails on demand: a TCP proxy between workers and PostgreSQL, in threads of the test's process.

    with Proxy.to_database() as proxy:
        worker = start_worker(DATABASE_URL=proxy.url).wait_ready()
        proxy.go_deaf()                    # half-open: nothing arrives any more, and nobody is told
        proxy.forward()                    # new connections work again; the deaf ones stay deaf
        proxy.go_deaf(new=False)           # as a firewall does that has forgotten: only those that are open
        proxy.go_deaf(new=False, name="pgqueue bell")  # and of these the ones whose application_name begins so
        proxy.reset()                      # cut what is open
        proxy.refuse()                     # cut what is open, and let nobody connect, until forward()
        lost = proxy.lose_commit_answer("UPDATE django_pgqueue_job")
        lost.wait(10)                      # committed, and the client will never know
        with proxy.recording() as statements:
            ...                            # what each session has asked meanwhile

While it is deaf, the proxy reads what it is sent, so that the kernels acknowledge it: neither ``tcp_user_timeout``
nor keepalives notice. The server is not told either when a client gives such a connection up, and keeps its
session and its locks until a limit of its own, `release_deaf`, or the proxy's end.

It answers requests for encryption with no, for it reads the statements that pass.
"""

import re
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

from django.db import connections

from .helpers import database_alias

_NO_ENCRYPTION = {80877103, 80877104}  # SSLRequest, GSSENCRequest
_CANCEL = 80877102
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST


class Lost:
    """One COMMIT answer that is to be lost; `wait` for it."""

    def __init__(self, pattern: str, silently: bool) -> None:
        self.pattern = re.compile(pattern)
        self.silently = silently
        self._happened = threading.Event()

    @property
    def happened(self) -> bool:
        return self._happened.is_set()

    def wait(self, seconds: float) -> None:
        assert self._happened.wait(seconds), f"no COMMIT after {self.pattern.pattern!r} has passed"


class Proxy:
    """Forwards from `port` on 127.0.0.1 to *server*, a (host, port) or the path of a Unix socket. From any thread."""

    def __init__(self, server: tuple[str, int] | str, user: str = "", password: str = "", dbname: str = "") -> None:
        self._server = server
        self.user = user
        self._password, self._dbname = password, dbname
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._threads: list[threading.Thread] = []
        self._mode = "forward"
        self._traps: list[Lost] = []
        self._is_closed = False
        self._records: list[list[tuple[str, str]]] = []
        self.accepted = 0  # connections, so far
        self._listening = self._listen(0)
        self.port: int = self._listening.getsockname()[1]
        self._start(self._accept, "proxy-accept")

    @classmethod
    @contextmanager
    def to_database(cls, alias: str = "default") -> "Iterator[Proxy]":
        """A proxy to the server of a database in DATABASES, closed with the block."""
        connection = connections[alias]
        connection.ensure_connection()
        info = connection.connection.info
        server = f"{info.host}/.s.PGSQL.{info.port}" if info.host.startswith("/") else (info.host, info.port)
        proxy = cls(server, info.user, info.password, info.dbname)
        try:
            yield proxy
        finally:
            proxy.close()

    @property
    def url(self) -> str:
        """The database's URL through this proxy."""
        credentials = quote(self.user, safe="") + (f":{quote(self._password, safe='')}" if self._password else "")
        return f"postgres://{credentials}@127.0.0.1:{self.port}/{self._dbname}"

    @contextmanager
    def alias(self, name: str = "proxied", **options: Any) -> Iterator[str]:
        """Another alias of the test's database, through this proxy, with *options* added to its OPTIONS."""
        with database_alias(name, **options) as connection:
            connection.settings_dict.update(HOST="127.0.0.1", PORT=self.port)
            yield name

    @property
    def open_connections(self) -> int:
        with self._lock:
            return sum(not link.is_over for link in self._links)

    @contextmanager
    def recording(self) -> Iterator[list[tuple[str, str]]]:
        """A list of all statements that pass meanwhile, each after the application_name of its session."""
        statements: list[tuple[str, str]] = []
        self._records = [*self._records, statements]
        try:
            yield statements
        finally:
            self._records = [record for record in self._records if record is not statements]

    # ---- what can go wrong

    def forward(self) -> None:
        """Let new connections work (again). Those that have gone deaf have lost bytes, and stay deaf."""
        with self._lock:
            was_refusing = self._mode == "refuse"
            self._mode = "forward"
            if was_refusing:
                self._listening = self._listen(self.port)
                self._start(self._accept, "proxy-accept")

    def go_deaf(self, *, new: bool = True, name: str = "") -> None:
        """
        Swallow, in both directions, whatever open connections are sent; those opened from now on, too, if *new*.

        Of the open ones only those whose application_name begins with *name*.
        """
        with self._lock:
            self._mode = "deaf" if new else "forward"
            for link in self._links:
                if link.application_name.startswith(name):
                    link.is_deaf = True

    def release_deaf(self) -> None:
        """Reset the deaf connections at both ends, as hosts do that hear from each other again."""
        self._cut([link for link in self._links if link.is_deaf])

    def reset(self) -> None:
        """Cut all open connections by RST."""
        self._cut(list(self._links))

    def refuse(self) -> None:
        """Cut all open connections, and refuse new ones until `forward`."""
        with self._lock:
            self._mode = "refuse"
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listening.close()
        self.reset()

    def lose_commit_answer(self, pattern: str, *, silently: bool = False) -> Lost:
        """
        Let the next COMMIT of a transaction with a statement that matches *pattern* (a regular expression) reach the
        server, and its answer nobody; or that statement, if it is a transaction of its own. Then the connection is
        cut, or goes deaf if *silently*.
        """
        lost = Lost(pattern, silently)
        with self._lock:
            self._traps.append(lost)
        return lost

    def forget_traps(self) -> None:
        """Lose no answers but those of COMMITs that have passed already."""
        with self._lock:
            self._traps.clear()

    def close(self) -> None:
        """Cut everything, stop the threads."""
        self._is_closed = True
        self.refuse()
        for thread in self._threads:
            thread.join(10)

    # ---- how

    def _listen(self, port: int) -> socket.socket:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
        return listening

    def _start(self, target: Any, name: str, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]
        thread.start()

    def _accept(self) -> None:
        listening = self._listening
        while True:
            try:
                client, _ = listening.accept()
            except OSError:  # refusing, or closed
                return
            with self._lock:
                self.accepted += 1
                if self._mode == "refuse" or self._is_closed:
                    _close(client)
                    return
                link = _Link(client, self)
                link.is_deaf = self._mode == "deaf"
                self._links = [*(link for link in self._links if not link.is_over), link]
                self._start(link.run, "proxy-link")

    def _connect(self) -> socket.socket:
        if isinstance(self._server, str):
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            return server
        server = socket.create_connection(self._server, 10)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    def _record(self, application_name: str, statement: str) -> None:
        for record in self._records:
            record.append((application_name, statement))

    def _take_trap(self, statement: str) -> Lost | None:
        with self._lock:
            for trap in self._traps:
                if trap.pattern.search(statement):
                    self._traps.remove(trap)
                    return trap
        return None

    def _give_back(self, trap: Lost) -> None:
        with self._lock:
            self._traps.append(trap)

    def _cut(self, links: "list[_Link]") -> None:
        for link in links:
            link.cut()


class _Link:
    """One client's connection, in one thread. The server is asked for when the client has said who it is."""

    def __init__(self, client: socket.socket, proxy: Proxy) -> None:
        self.is_deaf = False
        self.is_over = False
        self._client = client
        self._proxy = proxy
        self._server: socket.socket | None = None
        self._from_client = b""
        self._answer = b""  # to a COMMIT that is to be lost
        self._is_started = False
        self.application_name = ""
        self._prepared: dict[str, str] = {}  # statements by their names
        self._is_in_transaction = False
        self._trap: Lost | None = None  # of the open transaction
        self._is_committing = False
        self._wake_reader, self._wake_writer = socket.socketpair()

    def cut(self) -> None:
        """From any thread: have both sides reset."""
        with suppress(OSError):
            self._wake_writer.send(b"x")

    def run(self) -> None:
        try:
            # Messages are sent on one by one; each but the first would wait 40 ms for the one before it.
            self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pump()
        except OSError:
            pass  # one side has gone; so goes the other
        finally:
            self.is_over = True
            if self._trap is not None and not self._trap.happened:
                self._proxy._give_back(self._trap)
            for side in (self._client, self._server, self._wake_reader, self._wake_writer):
                if side is not None:
                    _close(side)

    def _pump(self) -> None:
        is_client_there = True
        while True:
            sides = [self._wake_reader]
            if is_client_there:
                sides.append(self._client)
            if self._server is not None:
                sides.append(self._server)
            readable, _, _ = select.select(sides, [], [])
            if self._wake_reader in readable:
                return
            if self._client in readable:
                data = self._client.recv(65536)
                if not data:
                    if not self.is_deaf:
                        return
                    is_client_there = False  # what the server will not hear
                elif not self.is_deaf:
                    self._from_client += data
                    self._forward_messages()
            if self._server is not None and self._server in readable:
                data = self._server.recv(65536)
                if not data:
                    if not self.is_deaf:
                        return
                    _close(self._server)
                    self._server = None
                elif not self.is_deaf:
                    self._hear_server(data)
            if self.is_over:
                return

    # ---- from the client, message by message

    def _forward_messages(self) -> None:
        while not self.is_over and not self.is_deaf:
            header = 5 if self._is_started else 4
            if len(self._from_client) < header:
                return
            (length,) = struct.unpack_from("!i", self._from_client, header - 4)
            end = length + header - 4
            if len(self._from_client) < end:
                return
            message, self._from_client = self._from_client[:end], self._from_client[end:]
            if self._is_started:
                self._see_statement(message)
            elif not self._begin(message):
                continue
            assert self._server is not None
            self._server.sendall(message)

    def _begin(self, message: bytes) -> bool:
        """The first message; whether the server gets it."""
        (code,) = struct.unpack_from("!i", message, 4)
        if code in _NO_ENCRYPTION:
            self._client.sendall(b"N")
            return False
        self._is_started = code != _CANCEL
        words = [word.decode(errors="replace") for word in message[8:].split(b"\0")]
        if "application_name" in words[::2]:
            self.application_name = words[words[::2].index("application_name") * 2 + 1]
        self._server = self._proxy._connect()
        return True

    def _see_statement(self, message: bytes) -> None:
        kind, body = message[:1], message[5:]
        if kind == b"Q":
            statement = body.strip(b"\0").decode(errors="replace")
        elif kind == b"P":
            name, statement, *_ = (part.decode(errors="replace") for part in body.split(b"\0", 2))
            self._prepared[name] = statement
            return
        elif kind == b"B":
            _, name, *_ = body.split(b"\0", 2)
            statement = self._prepared.get(name.decode(), "")
        else:
            return
        self._proxy._record(self.application_name, statement)
        words = statement.strip().upper()
        if words.startswith("BEGIN"):
            self._is_in_transaction = True
        if words.startswith("COMMIT"):
            self._is_in_transaction = False
            self._is_committing = self._trap is not None
        elif words.startswith("ROLLBACK"):
            self._is_in_transaction = False
            if self._trap is not None:
                self._proxy._give_back(self._trap)
                self._trap = None
        elif self._trap is None:
            self._trap = self._proxy._take_trap(statement)
            if not self._is_in_transaction:  # it is a transaction of its own
                self._is_committing = self._trap is not None

    # ---- from the server

    def _hear_server(self, data: bytes) -> None:
        if not self._is_committing:
            self._client.sendall(data)
            return
        self._answer += data
        if self._answer[-6:-1] != b"Z\0\0\0\5":  # not yet ready for another query
            return
        answer, self._answer = self._answer, b""
        self._is_committing = False
        trap, self._trap = self._trap, None
        assert trap is not None
        if _is_refusal(answer):
            self._proxy._give_back(trap)
            self._client.sendall(answer)
            return
        if trap.silently:
            self.is_deaf = True
        else:
            self.is_over = True
        trap._happened.set()


def _is_refusal(answer: bytes) -> bool:
    """Whether there is an error among the server's messages, or the end of a transaction that is none."""
    start = 0
    while start < len(answer):
        (length,) = struct.unpack_from("!i", answer, start + 1)
        if answer[start : start + 1] == b"E" or answer[start : start + 13] == b"C\0\0\0\rROLLBACK":
            return True
        start += 1 + length
    return False


def _close(side: socket.socket) -> None:
    with suppress(OSError):
        if side.family != socket.AF_UNIX:
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    side.close()
