"""Where a request ends, and whom it is for, is never a guess: what two readers could read differently is refused.

The classes of h11 CVE-2025-43859 (ends of chunks), aiohttp CVE-2024-52304 and CVE-2025-53643 (line feeds in chunk
extensions, trailers), CVE-2023-47627, gunicorn CVE-2024-1135 and CVE-2024-6827 (Transfer-Encoding with another value),
Node's llhttp CVE-2024-27982 (a space before a header), CVE-2025-23167 (`\r\n\rX`),
Netty CVE-2025-58056 (a line feed alone ends a chunk's line), Kestrel CVE-2025-55315 (chunk extensions).
"""

from __future__ import annotations

import re

import pytest

from worlds import connections

SECOND = "GET /second HTTP/1.1\r\nhost: t\r\n\r\n"
CHUNKED = "POST /a HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
END = "0\r\n\r\n"


def post(header: str, body: str) -> str:
    return f"POST /a HTTP/1.1\r\nhost: t\r\n{header}\r\n\r\n{body}"


def get(header: str) -> str:
    return f"GET /a HTTP/1.1\r\n{header}\r\n\r\n"


LINE_ENDS = [
    "GET /a HTTP/1.1\nhost: t\n\n",
    "GET /a HTTP/1.1\rhost: t\r\r",
    get("host: t\r\na: b\rc: d"),
    get("host: t\n"),
    get("host: t\r\n\rX: y"),
    get("host: t\r\na: b\n\ncontent-length: 5"),
]
FOLDED = [
    get("host: t\r\na: b\r\n c"),
    post("transfer-encoding:\r\n chunked", END),
    get(" host: t"),
    post("content-length: 1\r\n 0", "0123456789"),
    CHUNKED + "0\r\na: b\r\n c\r\n\r\n",
]
CHUNKS = [
    CHUNKED + one
    for one in (
        "1;a\nX\r\n" + END,
        "1\nX\r\n" + END,
        "1\r\nX\n" + END,
        "1\r\nX\r\n0\n\n",
        '1;a="\r\nX"\r\nX\r\n' + END,
        "1 \r\nX\r\n" + END,
        " 1\r\nX\r\n" + END,
        "+1\r\nX\r\n" + END,
        "1_0\r\n" + "X" * 16 + "\r\n" + END,
        "1;a\rb\r\nX\r\n" + END,
        "1;a\0\r\nX\r\n" + END,
        "1\r\nXY" + END,
        "1\r\nXYZ" + END,
        "\r\n" + END,
        "ffffffffffffffff1\r\n",
    )
]
CODINGS = [
    post(f"transfer-encoding: {one}", END)
    for one in (
        "chunked, chunked",
        "xchunked",
        "\x0bchunked",
        "chunked,",
        '"chunked"',
        "gzip, chunked",
        "",
        "chunked\r\ntransfer-encoding: x",
        "identity\r\ntransfer-encoding: chunked",
        "x\r\ntransfer-encoding: chunked",
        "chunked;a=b",
        "chunked\xa0",
        "identity",
    )
] + [post("transfer-encoding : chunked", END), post("transfer-encoding\t: chunked", END)]
LENGTHS = [
    post(one, "x" * 11)
    for one in (
        "content-length: 5\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 5",
        "content-length: 1, 1",
        "content-length: 1\r\ncontent-length: 1",
        "content-length: 1\r\ncontent-length: 2",
        "content-length: 1 1",
        "content-length: ",
        "content-length: \xa01",
        "content-length : 1",
        "content-length: 1;a",
        "content-length: 1.0",
    )
]
NAMES = [
    get(f"host: t\r\n{one}")
    for one in ("a : b", "a\x01: b", "\xe4: b", "a: \x01", "a: \x7f", "abc", ": b", "a b: c", "(a): b")
]
HOSTS = [
    get(one)
    for one in (
        "host: t\r\nhost: u",
        "host: t\r\nHost: t",
        "host: t, u",
        "host: a@t",
        "host: t/x",
        "host: t u",
        "host: t:80:90",
        "host: t:x",
        "host: [::1",
        "host: t?x",
        "host: t#x",
        "host: t\\x",
        "a: b",
    )
]
LINES = [
    f"{one}\r\nhost: t\r\n\r\n"
    for one in (
        "GET\t/a\tHTTP/1.1",
        "GET /a b HTTP/1.1",
        "get /a HTTP/1.1",
        "GET /a",
        "GET /a HTTP/1.2",
        "GET /a http/1.1",
        "GET /\xff HTTP/1.1",
        "GET /\x01 HTTP/1.1",
        "GET /a HTTP/1.1 ",
        "GET /a HTTP/11",
        "GET /a HTTP/1.1\x0b",
    )
]
TRAILERS = [
    CHUNKED + "0\r\n" + one + "\r\n\r\n" for one in ("content-length: 5", "transfer-encoding: chunked", "a\0: b")
]
AMBIGUOUS = [*LINE_ENDS, *FOLDED, *CHUNKS, *CODINGS, *LENGTHS, *NAMES, *HOSTS, *LINES, *TRAILERS]


@pytest.mark.parametrize("request_text", AMBIGUOUS)
def test_a_request_that_two_readers_would_end_elsewhere_is_refused_and_nothing_after_it_is_read(
    request_text: str,
) -> None:
    data = (request_text + SECOND).encode("latin-1")
    for size in (len(data), 1, 7):  # at once, and in pieces
        opened = connections.world()
        for at in range(0, len(data), size):
            if not opened.wire.closed:
                opened.send(data[at : at + size])
        statuses = re.findall(rb"HTTP/1\.1 (\d+)", opened.wire.written)
        assert statuses in ([b"400"], [b"415"]), opened.wire.written
        assert opened.app.seen == []
        assert opened.wire.closed or opened.wire.eof


@pytest.mark.parametrize(
    "host", ["t", "t:80", "t:", "", "127.0.0.1:1", "[::1]:80", "[fe80::1%25eth0]", "a_b.c-d~e", "x%20y"]
)
def test_a_host_that_is_one_is_taken(host: str) -> None:
    opened = connections.world()
    opened.send((get(f"host: {host}") + SECOND).encode())
    assert [one.path for one in opened.app.seen] == ["/a", "/second"]


@pytest.mark.parametrize("trailer", ["", "a: b\r\n", "host: u\r\n", "authorization: x\r\n"])
def test_trailers_change_nothing_of_their_request(trailer: str) -> None:
    opened = connections.world()
    opened.send((CHUNKED + "1;name=value\r\nX\r\n0\r\n" + trailer + "\r\n" + SECOND).encode())
    first, second = opened.app.seen
    assert (first.body, first.headers.get(b"host"), b"authorization" in first.headers) == (b"X", b"t", False)
    assert second.path == "/second"


def test_http_1_0_with_chunks_is_the_last_request_of_its_connection() -> None:
    opened = connections.world()
    opened.send(f"POST /a HTTP/1.0\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n{END}{SECOND}".encode())
    assert len(opened.app.seen) <= 1
    assert opened.wire.closed


@pytest.mark.parametrize("piece", ["1;" + "x" * 100 + "\r\nX\r\n", "1\r\nX\r\n", "1" + ";a=b" * 30 + "\r\nX\r\n"])
def test_a_body_that_trickles_in_chunks_is_bounded_by_its_chunks_and_by_time(piece: str) -> None:
    opened = connections.world()
    opened.send(CHUNKED.encode())
    for _ in range(connections.LIMITS.chunks + 1):
        if not opened.wire.closed:
            opened.send(piece.encode())
    assert opened.wire.written.startswith((b"HTTP/1.1 413", b"HTTP/1.1 431"))
    slow = connections.world()
    slow.send(CHUNKED.encode())
    for _ in range(connections.LIMITS.chunks):  # a byte of a chunk every second is no progress
        for byte in piece.encode():
            slow.clock.now += 1
            slow.send(bytes((byte,)))
            slow.server.sweep()
            if slow.wire.written:
                break
        if slow.wire.written:
            break
    assert slow.wire.written.startswith((b"HTTP/1.1 408", b"HTTP/1.1 413", b"HTTP/1.1 431"))


@pytest.mark.parametrize(
    "trickle", ["1;" + "x" * 100_000, "0\r\n" + "a: " + "b" * 100_000, "0\r\n" + "a: b\r\n" * 20_000]
)
def test_extensions_and_trailers_without_end_are_refused_within_the_size_of_a_head(trickle: str) -> None:
    opened = connections.world()
    opened.send(CHUNKED.encode())
    sent = 0
    for byte in trickle.encode():
        if opened.wire.written:
            break
        opened.connection.data_received(bytes((byte,)))
        sent += 1
    assert opened.wire.written.startswith(b"HTTP/1.1 431")
    assert sent <= 2 * connections.LIMITS.head_bytes
