"""Metadata and compression of gRPC calls that are made to cost or to confuse end their own call, and nothing else.

Triton CVE-2026-24175's class over HTTP/2, CWE-409 (a message that grows when it is opened), CWE-20.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from trueline.serve.protocols import grpc_base
from trueline.serve.protocols.grpc_base import header
from trueline.web.access_log import AccessLog

BODY_BYTES = 2**20
NAMES = ("authorization", "x-request-id", "x-trueline-key", "x-trueline-key-bin", "x-trueline-priority")


class Reader:
    """Reads every header that the server reads, in front of each call."""

    def __init__(self) -> None:
        self.read: list[bytes] = []

    def check(self, name: str, context: Any) -> None:
        self.read += [value for one in NAMES if (value := header(context, one)) is not None]

    async def parse(self, data: bytes) -> bytes:
        return data

    async def answer(self, request: bytes, context: Any) -> Any:
        return self

    def SerializeToString(self) -> bytes:
        return b"done"


@contextlib.asynccontextmanager
async def serving(log: AccessLog | None = None) -> AsyncIterator[tuple[Reader, int]]:
    reader = Reader()
    calls = grpc_base.AuthInterceptor(service="s", check=reader.check, log=log)
    handlers = grpc.method_handlers_generic_handler("s", {"m": calls.unary("m", reader.parse, reader.answer)})
    server, port = await grpc_base.serve([handlers], "127.0.0.1", 0, body_bytes=BODY_BYTES, connections=9)
    try:
        yield reader, port
    finally:
        await server.stop(None)


async def code(port: int, data: bytes, **options: Any) -> str:
    """Of one call by a client without limits of its own."""
    unlimited = [(f"grpc.{one}", 2**30) for one in ("max_metadata_size", "absolute_max_metadata_size")]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
        try:
            assert await channel.unary_unary("/s/m")(data, **options) == b"done"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


def test_a_compressed_message_is_bounded_by_what_it_becomes() -> None:
    """60 kB of gzip become 64 MiB; the bound is that of a plain message."""

    async def scene() -> None:
        async with serving() as (_, port):
            for data, expected in ((bytes(BODY_BYTES - 1), "OK"), (bytes(64 * BODY_BYTES), "RESOURCE_EXHAUSTED")):
                assert await code(port, data, compression=grpc.Compression.Gzip) == expected
            assert await code(port, b"") == "OK"

    asyncio.run(scene())


@pytest.mark.parametrize(
    "metadata",
    [
        [("a", "x" * 2**20)],
        [("a", "x" * 20_000)],
        [(f"k{at}", "v") for at in range(5000)],
        [("x-trueline-key", "v")] * 3000,
        [("a-bin", bytes(range(256)) * 400)],
    ],
    ids=["a megabyte", "beyond the limit", "thousands of keys", "one key thousands of times", "binary"],
)
def test_metadata_beyond_a_head_is_refused_with_its_call(metadata: list[tuple[str, str | bytes]]) -> None:
    async def scene() -> None:
        async with serving() as (reader, port):
            assert await code(port, b"", metadata=metadata) == "RESOURCE_EXHAUSTED"
            assert reader.read == []
            assert await code(port, b"", metadata=[("x-trueline-key", "k")]) == "OK"
            assert reader.read == [b"k"]

    asyncio.run(scene())


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return len(data).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + data


def literal(name: bytes, value: bytes) -> bytes:
    """A header of HPACK that is not indexed."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call(*headers: tuple[bytes, bytes]) -> bytes:
    """A call of `/s/m` as bytes of HTTP/2: no client library sends such headers."""
    usual = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/s/m"), (b":authority", b"t"),
             (b"te", b"trailers"), (b"content-type", b"application/grpc"))  # fmt: skip
    block = b"".join(literal(*one) for one in (*usual, *headers))
    return frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, b"\0\0\0\0\0")


BYTES = [b"\xff\xfe", "€".encode(), "\N{GRINNING FACE}".encode(), b"a\0b", b"a\r\nb: c", b"\x7f\x01", b"", b" " * 100]


@pytest.mark.parametrize("name", [one.encode() for one in NAMES])
@pytest.mark.parametrize("value", BYTES)
def test_metadata_of_any_bytes_is_read_or_ends_its_call_alone(name: bytes, value: bytes, tmp_path: Path) -> None:
    """Also where it is written: the access log has one line for each call."""
    log = AccessLog(str(tmp_path / "log"))

    async def scene() -> None:
        async with serving(log) as (_, port):
            got = await asyncio.to_thread(exchange, port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + call((name, value)))
            assert b"done" in got or name.endswith(b"-bin"), got
            assert b"the model failed" not in got
            assert b"Unexpected <class" not in got
            assert await code(port, b"") == "OK"
        expected = 2 if b"done" in got else 1
        log.close()
        assert len((tmp_path / "log").read_text().splitlines()) == expected

    asyncio.run(scene())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: t\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, b"\xff" * 100),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + call((b":path", b"/s/m"), (b":path", b"/other")),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + call((b"Upper", b"x"), (b"transfer-encoding", b"chunked")),
    ],
    ids=["HTTP/1.1", "no frames", "no HPACK", "two paths", "headers of HTTP/1.1"],
)
def test_bytes_that_are_no_call_end_their_connection_alone(data: bytes) -> None:
    async def scene() -> None:
        async with serving() as (_, port):
            await asyncio.to_thread(exchange, port, data)
            assert await code(port, b"") == "OK"

    asyncio.run(scene())


def exchange(port: int, data: bytes) -> bytes:
    """What a server answers, until it has ended the call or the connection."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
        wire.sendall(data)
        with contextlib.suppress(ConnectionError):
            while not ends(got) and (more := wire.recv(65536)):
                got += more
    return got


def ends(got: bytes) -> bool:
    """Whether the last frame of stream 1, or of the connection, has come."""
    at = 0
    while len(got) >= at + 9:
        size, kind, flags = int.from_bytes(got[at : at + 3], "big"), got[at + 3], got[at + 4]
        stream = int.from_bytes(got[at + 5 : at + 9], "big")
        whole = len(got) >= at + 9 + size
        if whole and (kind == 7 or (stream == 1 and (kind == 3 or (kind in (0, 1) and flags & 1)))):
            return True
        at += 9 + size
    return False
