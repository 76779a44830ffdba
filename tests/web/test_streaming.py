"""An answer in pieces reaches the client as it comes, and one that breaks off cannot be taken for a whole one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from trueline.web.messages import Request, Response, StreamBroken, StreamedBody
from worlds.connections import World, get, world


@dataclass
class Stopped:
    """How often who writes was told to stop."""

    times: int = 0

    def __call__(self) -> None:
        self.times += 1


@dataclass
class Tap:
    """An App whose answers to /pieces come in pieces that the test adds."""

    stopped: Stopped = field(default_factory=Stopped)
    open: list[StreamedBody] = field(default_factory=list)

    def answer(self, request: Request) -> Response:
        if request.path != "/pieces":
            return Response(200, b"whole")
        self.open.append(StreamedBody(self.stopped))
        return Response(200, b"", b"text/plain", pieces=self.open[-1])

    def refuse(self, path: str, status: int, message: str) -> Response:
        return Response(status, message.encode())


def tapped() -> tuple[World, Tap]:
    w, tap = world(), Tap()
    w.connection._app = tap
    return w, tap


def test_pieces_are_chunks_that_are_sent_when_they_come_and_the_next_request_waits_for_the_last() -> None:
    w, tap = tapped()
    head = w.send(get("/pieces") + get("/a"))
    assert b"transfer-encoding: chunked\r\n" in head
    assert b"content-length" not in head
    assert head.endswith(b"\r\n\r\n")
    before = len(w.wire.written)
    tap.open[0].add(b"one ")
    assert w.wire.written[before:] == b"4\r\none \r\n"
    tap.open[0].add(b"")
    assert w.wire.written[before:] == b"4\r\none \r\n", "an empty chunk would be the end"
    tap.open[0].add(b"two")
    tap.open[0].end()
    rest = w.wire.written[before:]
    assert rest.startswith(b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\nHTTP/1.1 200"), "and then the answer to /a"
    assert rest.endswith(b"whole")
    assert not w.wire.closed
    assert not tap.stopped.times


def test_an_old_client_gets_the_pieces_plain_until_the_connection_ends() -> None:
    w, tap = tapped()
    head = w.send(get("/pieces", "connection: keep-alive", version="1.0"))
    assert b"chunked" not in head
    assert b"connection: close" in head
    tap.open[0].add(b"one")
    tap.open[0].end()
    assert w.wire.written.endswith(b"\r\n\r\none")
    assert w.wire.closed
    assert not w.wire.aborted


def test_an_answer_that_breaks_off_has_no_last_chunk_and_ends_the_connection() -> None:
    w, tap = tapped()
    w.send(get("/pieces"))
    tap.open[0].add(b"one")
    tap.open[0].end(torn=True)
    assert w.wire.written.endswith(b"3\r\none\r\n")
    assert w.wire.aborted


def test_who_writes_is_told_when_the_client_goes_and_when_it_reads_too_slowly() -> None:
    w, tap = tapped()
    w.send(get("/pieces"))
    w.connection.connection_lost(None)
    assert tap.stopped.times == 1
    stopped = Stopped()
    slow = StreamedBody(stopped, max_ahead_bytes=10)
    slow.add(b"12345678")
    assert not slow.over
    slow.add(b"12345678")
    assert (slow.over, slow.torn, stopped.times) == (True, True, 1)
    slow.add(b"more")
    assert slow.take() == [b"12345678", b"12345678"]


def test_a_client_that_does_not_read_gets_the_pieces_once_it_does() -> None:
    w, tap = tapped()
    w.send(get("/pieces"))
    w.connection.pause_writing()
    before = len(w.wire.written)
    tap.open[0].add(b"one")
    tap.open[0].end()
    assert len(w.wire.written) == before
    w.connection.resume_writing()
    assert w.wire.written[before:] == b"3\r\none\r\n0\r\n\r\n"


def test_a_head_request_gets_the_head_and_the_writer_stops() -> None:
    w, tap = tapped()
    found = w.send(get("/pieces").replace(b"GET", b"HEAD"))
    assert found.endswith(b"\r\n\r\n")
    assert tap.stopped.times == 1
    assert b"whole" in w.send(get("/a"))


def test_a_server_that_drains_lets_an_answer_come_to_its_end() -> None:
    w, tap = tapped()
    w.send(get("/pieces"))
    w.server.draining = True
    w.connection.drain()
    assert not w.wire.closed
    tap.open[0].add(b"one")
    tap.open[0].end()
    assert w.wire.written.endswith(b"3\r\none\r\n0\r\n\r\n")
    assert w.wire.closed
    assert not w.wire.aborted


def test_pieces_can_be_read_one_by_one_or_as_a_whole() -> None:
    async def told(*, torn: bool) -> list[bytes]:
        pieces = StreamedBody(Stopped())
        loop = asyncio.get_running_loop()
        pieces.add(b"one")
        loop.call_soon(pieces.add, b"two")
        loop.call_soon(lambda: pieces.end(torn=torn))
        return [bytes(piece) async for piece in pieces.each()]

    assert asyncio.run(told(torn=False)) == [b"one", b"two"]
    with pytest.raises(StreamBroken):
        asyncio.run(told(torn=True))


@pytest.mark.parametrize("torn", [False, True])
def test_what_comes_with_the_end_while_a_piece_is_on_its_way_is_not_lost(torn: bool) -> None:
    async def read() -> list[bytes]:
        pieces, found = StreamedBody(Stopped()), []
        pieces.add(b"one ")
        try:
            async for piece in pieces.each():
                found.append(bytes(piece))
                pieces.add(b"two")  # nothing, once it is over
                pieces.end(torn=torn)
        except StreamBroken:
            found.append(b"torn")
        return found

    assert asyncio.run(read()) == [b"one ", b"two", *([b"torn"] if torn else [])]
