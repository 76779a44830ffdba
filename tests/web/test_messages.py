"""The HTTP connection, driven byte by byte against a transport and a clock that the test holds."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from time import gmtime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trueline.web.header_cache import HeaderCache
from trueline.web.messages import Request, Response, date_line, path_of
from trueline.web.parser import HttpLimits, Waits, judge
from worlds.connections import LIMITS, Wire, get, post, world


def answers(stream: bytes) -> list[tuple[int, bytes]]:
    """Status and body of a run of answers, framed by their lengths."""
    found = []
    while stream:
        head, _, rest = stream.partition(b"\r\n\r\n")
        lengths = [line[16:] for line in head.split(b"\r\n") if line.startswith(b"content-length: ")]
        length = int(lengths[0]) if lengths else 0
        found.append((int(head[9:12]), rest[:length]))
        stream = rest[length:]
    return found


def statuses(stream: bytes) -> list[int]:
    return [status for status, _ in answers(stream)]


def bodies(stream: bytes) -> list[bytes]:
    return [body for _, body in answers(stream)]


def test_a_request_is_answered_and_the_connection_kept() -> None:
    w = world()
    assert bodies(w.send(post(b"hello"))) == [b"POST /a hello"]
    assert bodies(w.send(get("/b"))) == [b"GET /b "]
    assert not w.wire.closed


@given(st.data())
def test_however_the_bytes_are_cut_the_answers_are_the_same(data: st.DataObject) -> None:
    head = b"POST /c HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked = head + b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nt: 1\r\n\r\n"
    stream = get("/1") + post(b"x" * 30, path="/2") + chunked + get("/4")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    w = world()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        w.connection.data_received(stream[start:end])
    assert bodies(w.wire.written) == [b"GET /1 ", b"POST /2 " + b"x" * 30, b"POST /c abcdefg", b"GET /4 "]


def said(request: Request) -> tuple[object, ...]:
    """All that a request says."""
    return (
        request.method, request.target, request.path, request.headers, bytes(request.body), request.keep_alive,
        request.http_1_0,
    )  # fmt: skip


class Forgetful(HeaderCache):
    """Keeps nothing: every request goes through the parser."""

    def keep(self, data: bytes, request: Request) -> None:
        pass


PIECES = [
    get(),
    get("/b?c=d"),
    get("/a", "connection: close"),
    get("/a", "connection: upgrade", "upgrade: h2c"),
    get("/a", version="1.0"),
    get("/a", "connection: keep-alive", version="1.0"),
    get().replace(b"GET", b"HEAD"),
    get().replace(b"GET", b"CONNECT"),
    get().replace(b"\r\n", b"\n"),
    get()[:-2],
    get() * 2,
    post(b"hello"),
    post(b"world"),
    post(b"hello" * 300),
    post(b"\r\n\r\n"),
    post(b"GET / HTTP/1.1\r\nhost: t\r\n\r\n"),
    post(b"hello")[:-5],
    post(b"hello", "expect: 100-continue"),
    post(b"hello") + get(),
    b"\n" + post(b"a\r\n\r\nb", "x: y").replace(b"\r\n", b"\n"),
    b"POST /c HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"hello",
    b"\r\n\r\n",
    b"\r\n",
    b"\n",
    b"",
]


@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=2).map(b"".join), max_size=12))
@example([b"\r\n\r\n", get(), b"\r\n\r\n", b"\r\n\r\n"])
@example([b"\r\n\r\n" + get(), b"\r\n\r\n" + get(), b"\r\n\r\n"])
@example([post(b"hello")[:-5], b"hello", post(b"hello")[:-5], b"hello"])
def test_what_is_remembered_of_heads_changes_no_answer(chunks: list[bytes]) -> None:
    remembering, parsing = world(), world(heads=Forgetful(LIMITS.body_bytes))
    parsing.server.date = remembering.server.date
    for chunk in [*chunks, *chunks]:
        assert remembering.send(chunk) == parsing.send(chunk)
        assert remembering.wire.closed == parsing.wire.closed
        if parsing.wire.closed:
            break
    assert [said(one) for one in remembering.app.seen] == [said(one) for one in parsing.app.seen]


def test_head_gets_the_head_alone_with_the_length_of_the_body() -> None:
    answer = world().send(get().replace(b"GET", b"HEAD"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: 8" in head
    assert body == b""


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x00\x01\x02\x03", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nhost: t\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: +3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip\r\n\r\nabc", 415),
        (b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 415),
        (b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n" + b"64\r\n" + b"x" * 100 + b"\r\n", 0),
        (
            b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
            + (b"64\r\n" + b"x" * 100 + b"\r\n") * 11,
            413,
        ),
        (b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50, 0),
        (b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 51, 413),
        (b"GET /" + b"a" * 500 + b" HTTP/1.1\r\nhost: t\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: t\r\nx: " + b"a" * 500 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: t\r\n" + b"x: y\r\n" * 100 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nhost: t\r\nexpect: a miracle\r\ncontent-length: 3\r\n\r\n", 417),
        (b"POST / HTTP/1.1\r\nhost: t\r\nupgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 3\r\n\r\nabc", 400),
    ],
)
def test_what_is_no_request_within_bounds_is_refused_and_the_connection_closed(
    request_bytes: bytes, status: int
) -> None:
    w = world()
    answer = w.send(request_bytes)
    assert statuses(answer) == ([status] if status else [])
    if status:
        assert b"connection: close" in answer
        assert w.wire.eof
        assert w.send(get()) == b""
    assert w.app.seen == []


def test_a_header_that_never_ends_is_refused_before_it_fills_the_memory() -> None:
    w = world()
    w.send(b"GET / HTTP/1.1\r\nhost: t\r\nx: ")
    for _ in range(5):
        w.send(b"a" * 100)
    assert statuses(w.wire.written) == [431]


def test_a_refused_request_waits_for_the_answers_before_it() -> None:
    assert statuses(world().send(get() + get() + b"rubbish\r\n\r\n")) == [200, 200, 400]


def test_a_client_that_expects_100_is_told_to_go_on_once() -> None:
    w = world()
    request = post(b"hello", "expect: 100-continue")
    head, body = request[:-5], request[-5:]
    assert w.send(head) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert bodies(w.send(body)) == [b"POST /a hello"]


def test_a_body_that_comes_with_its_expectation_needs_no_100() -> None:
    assert statuses(world().send(post(b"hello", "expect: 100-continue"))) == [200]


def test_a_body_over_the_bound_is_refused_before_it_is_sent() -> None:
    head = b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 5000\r\nexpect: 100-continue\r\n\r\n"
    assert statuses(world().send(head)) == [413]


@pytest.mark.parametrize(
    ("request_bytes", "closes"),
    [
        (get("/a", "connection: close"), True),
        (get("/a", version="1.0"), True),
        (get("/a", "connection: keep-alive", version="1.0"), False),
        (get("/a", "connection: upgrade", "upgrade: h2c"), True),
    ],
)
def test_the_connection_lives_as_long_as_the_client_wants(request_bytes: bytes, closes: bool) -> None:
    w = world()
    answer = w.send(request_bytes)
    assert statuses(answer) == [200]
    assert w.wire.closed == closes
    assert (b"connection: close" in answer) == closes


def test_pipelined_answers_keep_the_order_of_their_requests() -> None:
    loop = asyncio.new_event_loop()
    w = world(loop=loop)
    w.send(get("/later/1") + get("/2") + get("/later/3") + get("/4"))
    assert w.wire.written == b""
    w.app.later[0].set_result(Response(200, b"one"))
    loop.run_until_complete(asyncio.sleep(0))
    assert bodies(w.wire.written) == [b"one", b"GET /2 "]
    w.app.later[1].set_result(Response(200, b"three"))
    loop.run_until_complete(asyncio.sleep(0))
    assert bodies(w.wire.written) == [b"one", b"GET /2 ", b"three", b"GET /4 "]
    loop.close()


def test_a_client_that_runs_ahead_is_not_read_until_it_is_answered() -> None:
    loop = asyncio.new_event_loop()
    w = world(loop=loop)
    w.send(get("/later") + get() * 5)
    assert not w.wire.reading
    w.app.later[0].set_result(Response(200, b""))
    loop.run_until_complete(asyncio.sleep(0))
    assert w.wire.reading
    assert len(statuses(w.wire.written)) == 6
    loop.close()


def test_a_client_that_does_not_read_gets_no_further_answer_until_it_does() -> None:
    w = world()
    w.connection.pause_writing()
    assert w.send(get()) == b""
    assert not w.wire.reading
    w.connection.resume_writing()
    assert statuses(w.wire.written) == [200]
    assert w.wire.reading


def test_what_a_lost_client_waits_for_is_cancelled() -> None:
    loop = asyncio.new_event_loop()
    w = world(loop=loop)
    w.send(get("/later") + get())
    w.connection.connection_lost(None)
    assert w.app.later[0].cancelled()
    assert len(w.app.seen) == 1
    assert w.server.num_connections == 0
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.mark.parametrize(
    ("waits", "now", "verdict"),
    [
        (Waits(idle=0.0), 74.0, "keep"),
        (Waits(idle=0.0), 76.0, "close"),
        (Waits(receiving=0.0), 19.0, "keep"),
        (Waits(receiving=0.0), 21.0, "refuse"),
        (Waits(receiving=0.0, received_bytes=16 * 2**10 * 10), 29.0, "keep"),
        (Waits(receiving=0.0, received_bytes=16 * 2**10 * 10), 31.0, "refuse"),
        (Waits(writing=0.0), 31.0, "abort"),
        (Waits(lingering=0.0, idle=0.0), 1.0, "keep"),
        (Waits(lingering=0.0), 3.0, "close"),
        (Waits(), 1e9, "keep"),
    ],
)
def test_a_connection_is_given_the_time_that_its_state_deserves(waits: Waits, now: float, verdict: str) -> None:
    assert judge(waits, now, HttpLimits()) == verdict


def test_a_request_that_trickles_is_refused_with_408() -> None:
    w = world()
    w.send(post(b"hello")[:-1])
    w.clock.now += LIMITS.receive_s + 1
    w.server.sweep()
    assert statuses(w.wire.written) == [408]


def test_an_idle_connection_is_closed_without_a_word() -> None:
    w = world()
    w.send(get())
    before = w.wire.written
    w.clock.now += LIMITS.idle_s + 1
    w.server.sweep()
    assert w.wire.closed
    assert w.wire.written == before


def test_a_request_that_takes_long_to_answer_is_not_cut_off() -> None:
    loop = asyncio.new_event_loop()
    w = world(loop=loop)
    w.send(get("/later"))
    w.clock.now += 10_000
    w.server.sweep()
    assert not w.wire.closed
    loop.close()


def test_draining_closes_the_idle_and_lets_the_busy_finish() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        busy = world(loop=loop)
        idle = busy.server()
        quiet = Wire()
        idle.connection_made(quiet)  # type: ignore[arg-type]
        busy.send(get("/later"))
        draining = loop.create_task(busy.server.drain())
        await asyncio.sleep(0)
        assert quiet.closed
        assert not busy.wire.closed
        busy.app.later[0].set_result(Response(200, b"done"))
        await asyncio.sleep(0)
        assert bodies(busy.wire.written) == [b"done"]
        assert b"connection: close" in busy.wire.written
        idle.connection_lost(None)
        busy.connection.connection_lost(None)
        await draining

    asyncio.run(scene())


def test_paths_are_decoded_and_lose_their_query() -> None:
    assert path_of(b"/v2/models/a%2Fb%ff?x=/y") == "/v2/models/a/b\ufffd"
    assert path_of(b"http://host:1/v2?x") == "/v2"
    assert path_of(b"*") == "*"


def test_a_server_that_drains_closes_also_after_a_request_whose_head_it_knows() -> None:
    w = world()
    w.send(get())
    assert b"connection: close" not in w.send(get()), "its head is known by now"
    w.server.draining = True
    assert b"connection: close" in w.send(get())
    assert w.wire.closed


def test_a_server_has_drained_when_its_last_connection_is_gone_and_not_before() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        busy = world(loop=loop)
        busy.send(get("/later"))
        draining = loop.create_task(busy.server.drain())
        for _ in range(5):
            await asyncio.sleep(0)
            assert not draining.done()
        busy.app.later[0].set_result(Response(200, b"done"))
        await asyncio.sleep(0)
        assert not draining.done(), "the connection is still open"
        busy.connection.connection_lost(None)
        await asyncio.wait_for(draining, 100)

    asyncio.run(scene())


def test_the_date_is_that_of_the_second_on_every_day_of_some_years(monkeypatch: pytest.MonkeyPatch) -> None:
    for second in range(0, 3 * 366 * 86_400, 86_399):
        monkeypatch.setattr("time.gmtime", lambda at=second: gmtime(at))
        assert date_line() == f"date: {formatdate(second, usegmt=True)}\r\n".encode()
