"""The connections of learners to the head: who may connect, what arrives, and which are gone."""

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trueline.engine.hosts import route, tls
from trueline.engine.hosts.token import TokenFile, find_fault, issue_token
from trueline.errors import UsageError
from trueline.train.cluster.store import JoinKit
from trueline.train.learners import messages
from trueline.train.learners.rendezvous import Rendezvous


class LearnerLink:
    """The connection of a learner."""

    def __init__(self, hello: messages.LearnerHello, writer: asyncio.StreamWriter) -> None:
        self.role, self.number, self.writer = hello.role, hello.learner, writer
        self.heard_at = time.monotonic()


class LearnerLinks:
    """`hear` gets a learner's number and message, `lose` its link once that is gone. `find_rendezvous` is for the
    processes of a learner's script in a generation; None: they are of an earlier one."""

    def __init__(
        self,
        is_current: Callable[[str], bool],
        hear: Callable[[int, Any], None],
        lose: Callable[[LearnerLink, str], None],
        find_rendezvous: Callable[[int], Rendezvous | None],
    ) -> None:
        self._is_current, self._hear, self._lose, self._find = is_current, hear, lose, find_rendezvous
        self._secret = secrets.token_urlsafe(32)
        self.links: dict[int, LearnerLink] = {}
        self.empty = asyncio.Event()
        self.empty.set()
        """Set while there are none."""

    async def listen(self, job: str, address: str, ports: str, scratch: Path) -> tuple[asyncio.Server, JoinKit]:
        """The server, and what a learner needs to connect. Raises MissingPackage, UsageError."""
        certificates = tls.make_certificates(job)
        server = await asyncio.start_server(
            self._accept, address, _find_port(address, ports), ssl=_make_context(certificates, scratch)
        )
        own = route.join_address(address, server.sockets[0].getsockname()[1])
        token = issue_token(self._secret, now=time.time())
        return server, JoinKit(address=own, token=TokenFile(job=job, token=token, ca=certificates.ca.decode()))

    def send_all(self, message: messages.FromGroupMaster) -> None:
        for link in self.links.values():
            messages.send(link.writer, message)

    async def pulse(self) -> None:
        """Keeps the connections until it is cancelled; gives up those that are silent."""
        while True:
            self.send_all(messages.LearnerPulse())
            await asyncio.sleep(messages.PULSE_S)
            for link in list(self.links.values()):
                if time.monotonic() - link.heard_at > messages.SILENT_S:
                    self.drop(link, f"nothing came from it for {messages.SILENT_S:.0f} s")

    def drop(self, link: LearnerLink, why: str) -> None:
        if self.links.get(link.number) is link:
            del self.links[link.number]
            if not self.links:
                self.empty.set()
            link.writer.close()
            self._lose(link, why)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = None
        with contextlib.suppress(EOFError, OSError, ValueError, TimeoutError):  # it is gone
            hello = await messages.receive(reader, messages.decode_from_learner)
            if fault := self._find_fault(hello):
                messages.send(writer, messages.Dismiss(fault))
            elif hello.tunnel:
                if (rendezvous := self._find(hello.generation)) is not None:
                    await rendezvous.serve(hello.learner, reader, writer)
            else:
                link = self.links[hello.learner] = LearnerLink(hello, writer)
                self.empty.clear()
                while True:
                    message = await messages.receive(reader, messages.decode_from_learner)
                    link.heard_at = time.monotonic()
                    self._hear(link.number, message)
        if link is not None:
            self.drop(link, "its host is gone")
        writer.close()

    def _find_fault(self, hello: object) -> str:
        if not isinstance(hello, messages.LearnerHello):
            return "a learner begins with its hello"
        if fault := find_fault(hello.token, self._secret, now=time.time()):
            return fault
        return "" if self._is_current(hello.role) else f"{hello.role} has been replaced"


def _make_context(certificates: tls.LaunchCertificates, scratch: Path) -> ssl.SSLContext:
    pem = scratch / "master.pem"
    pem.touch(mode=0o600)
    pem.write_bytes(certificates.key + certificates.master)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    pem.unlink()
    return context


def _find_port(address: str, ports: str) -> int:
    """A free port of FIRST-LAST; 0, any, without them. Raises UsageError."""
    first, _, last = ports.partition("-")
    for port in range(int(first), int(last or first) + 1) if ports else (0,):
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            return port
    raise UsageError(f"no port of {ports} is free at {address}", hint="give more ports in trueline.toml")
