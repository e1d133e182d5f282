"""A mail server on a free local port that writes each mail to a file and knows only one domain."""

import asyncio
import socket
import threading
from email import message_from_bytes
from itertools import count
from pathlib import Path
from types import TracebackType
from weakref import WeakKeyDictionary

from aiosmtpd.smtp import SMTP, Envelope, Session


class MailServer:
    """
    Serve SMTP for the time of a ``with`` block, in a thread.

    Mails go to *directory* as 0001.eml, 0002.eml, …, each complete before its sender is told so. An
    address outside *domain* is refused with 550.

    To the sender of the receipt for the order `slow_goodbye_to` the server does not say goodbye, once: the
    mail is accepted, and the task that sent it waits in the last line of its conversation. Then
    `is_waiting` is set.
    """

    def __init__(self, directory: Path, domain: str) -> None:
        self.directory = directory
        self.domain = domain
        self.slow_goodbye_to: int | None = None
        self.is_waiting = threading.Event()
        self._orders: WeakKeyDictionary[Session, int] = WeakKeyDictionary()  # whose receipt a session brought
        self._numbers = count(1)
        # The protocol is named so that asyncio turns Nagle's algorithm off; else each mail waits 40 ms.
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="mail-server")

    def __enter__(self) -> "MailServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._loop.create_server(self._protocol, sock=self._listener))
            self._loop.run_forever()
        finally:
            self._listener.close()
            self._loop.close()

    def _protocol(self) -> SMTP:
        return SMTP(self, hostname="localhost", loop=self._loop)  # a host name, lest it ask DNS for one

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        domain = address.rpartition("@")[2]
        if domain.lower() != self.domain:
            return f"550 5.1.2 There is no domain {domain}"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        content = envelope.original_content or b""
        (self.directory / f"{next(self._numbers):04}.eml").write_bytes(content)
        self._orders[session] = int(message_from_bytes(content)["X-Order"])
        return "250 OK"

    async def handle_QUIT(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        order = self._orders.pop(session, None)
        if order is not None and order == self.slow_goodbye_to:
            self.slow_goodbye_to = None
            self.is_waiting.set()
            await asyncio.Event().wait()  # until the sender is gone
        return "221 Bye"
