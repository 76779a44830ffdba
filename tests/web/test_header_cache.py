"""Heads that a connection has seen are recognised past values that vary; the parser decides what a request is."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trueline.web import header_cache
from trueline.web.header_cache import MAX_MISSES, HeaderCache
from trueline.web.messages import Request
from trueline.web.parser import HttpLimits, RequestParser, RequestRejected
from worlds.connections import LIMITS, get, post, world

LIMIT = LIMITS.body_bytes


def head(*headers: tuple[str, str], line: str = "POST /a HTTP/1.1") -> bytes:
    return "\r\n".join([line, *[f"{name}: {value}" for name, value in headers], "", ""]).encode("latin-1")


def whole(number: int, body: bytes = b"{}", **more: str) -> bytes:
    """A request as clients send it, with a length, an id and a trace of its own."""
    fixed = [("Host", "t"), ("User-Agent", "httpx"), *more.items()]
    own = [("x-request-id", str(uuid.UUID(int=number))), ("traceparent", f"00-{number:032x}-{number:016x}-01")]
    return head(*fixed, *own, ("Content-Length", str(len(body)))) + body


class Counting(HeaderCache):
    """Counts what it recognised."""

    def __init__(self, body_bytes: int = LIMIT) -> None:
        super().__init__(body_bytes)
        self.known = self.layouts = 0

    def find(self, data: bytes) -> Request | None:
        found = super().find(data)
        self.known += found is not None
        return found


def parsed(data: bytes) -> list[Request] | None:
    """What a parser without a memory makes of `data`; None: it rejects it or waits for more."""
    taken: list[Request] = []
    parser = RequestParser(HttpLimits(body_bytes=LIMIT), HeaderCache(LIMIT), lambda: 0.0, taken.append)
    try:
        parser.feed(data)
    except RequestRejected:
        return None
    return taken if parser.since is None and not parser.silent_bytes else None


def parts(request: Request) -> tuple[object, ...]:
    return (
        request.method, request.target, request.path, request.headers, bytes(request.body), request.keep_alive,
        request.http_1_0,
    )  # fmt: skip


def test_a_request_with_a_head_that_was_read_before_is_not_parsed_again() -> None:
    w = world(heads=(memory := Counting()))
    for body in (b"hello", b"world", b"again"):
        assert w.send(post(body)).endswith(b"POST /a " + body)
    assert memory.known == 2


def test_heads_that_differ_in_the_values_of_some_headers_are_recognised_by_the_third() -> None:
    w = world(heads=(memory := Counting()))
    for number in range(10):
        body = b"x" * (number + 95)
        assert w.send(whole(number, body)).endswith(b"POST /a " + body)
    assert memory.known == 8
    seen = w.app.seen
    assert [one.headers[b"x-request-id"].decode() for one in seen] == [str(uuid.UUID(int=n)) for n in range(10)]
    assert [int(one.headers[b"traceparent"][3:35], 16) for one in seen] == list(range(10))
    assert len({id(one.head) for one in seen[2:]}) == 1
    assert seen[-1].head is not None
    assert seen[-1].head.varying == {b"x-request-id", b"traceparent", b"content-length"}


def test_headers_of_one_request_are_not_those_of_another_that_is_still_being_answered() -> None:
    memory = Counting()
    for number in range(3):
        for one in parsed(whole(number)) or []:
            memory.keep(whole(number), one)
    first, second = memory.find(whole(7)), memory.find(whole(8))
    assert first is not None
    assert second is not None
    assert first.headers[b"x-request-id"] != second.headers[b"x-request-id"]
    assert parts(first) == parts((parsed(whole(7)) or [])[0])


def test_no_connection_knows_heads_of_another() -> None:
    one, other = world(heads=Counting()), world(heads=(memory := Counting()))
    for number in range(5):
        one.send(whole(number))
    other.send(whole(5, Authorization="Bearer of another"))
    assert memory.known == 0
    assert memory._layout is not None
    assert b"Bearer of another" not in repr(one.app.seen).encode()


VALUES = st.one_of(
    st.sampled_from(["0", "2", "+2", "02", "2 ", " 2", "", "a b", "é", "a\tb", "\x00", "\x7f", "close", "chunked"]),
    st.sampled_from(["keep-alive", "100-continue", "h2c", "a,b", "999999999999999999", "²", "2, 2", "a\rb", "a\nb: c"]),
    st.text(st.characters(codec="latin-1"), max_size=6),
)
NAMES = st.sampled_from(
    ["x", "X", "Host", "Content-Length", "Connection", "Transfer-Encoding", "Expect", "Upgrade", "Cookie", "te", "y"]
)


@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.lists(
        st.tuples(st.lists(VALUES, min_size=6, max_size=6), st.sampled_from([b"", b"ab", b"\r\n\r\n"])), max_size=8
    ),
)
@example([("x", "1")], [(["2", "t", "0"] * 2, b""), (["3", "t", "2"] * 2, b"ab"), (["a\nb: c", "t", "2"] * 2, b"ab")])
def test_whatever_is_recognised_is_the_request_that_the_parser_makes(
    more: list[tuple[str, str]], requests: list[tuple[list[str], bytes]]
) -> None:
    memory = HeaderCache(LIMIT)
    names = ["x", *[name for name, _ in more], "Content-Length"]
    for values, body in [(["1", "1", "1", "1", "1", "2"], b"ab"), *requests, *requests]:
        lengths = [str(len(body)), values[-1]]
        for length in lengths:
            lines = list(zip(names, [*values[: len(names) - 1], length], strict=True))
            data = head(("Host", "t"), *lines) + body
            found, made = memory.find(data), parsed(data)
            if found is not None:
                assert made is not None, "the parser rejects it or waits for more"
                assert [parts(found)] == [parts(one) for one in made]
            for one in made or []:
                memory.keep(data, one)


@pytest.mark.parametrize(
    "data",
    [
        whole(9)[:-1],
        whole(9) + b"x",
        whole(9) + whole(10),
        whole(9, b"x" * (LIMIT + 1)),
        whole(9).replace(b"POST /a", b"POST /b"),
        whole(9).replace(b"Host: t", b"Host: u"),
        whole(9).replace(b"\r\n", b"\n"),
        whole(9).replace(b"httpx", b"x" * header_cache.MAX_HEAD_BYTES),
        whole(9).replace(b"Content-Length: 2", b"Content-Length: +2"),
        get(),
        b"",
    ],
)
def test_what_is_not_exactly_one_request_of_the_layout_goes_to_the_parser(data: bytes) -> None:
    memory = HeaderCache(LIMIT)
    for number in range(5):
        for one in parsed(whole(number, b"x" * number)) or []:
            memory.keep(whole(number, b"x" * number), one)
    assert memory.find(whole(9)) is not None
    assert memory.find(data) is None


def test_a_client_whose_heads_have_nothing_in_common_makes_few_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(header_cache, "HeadLayout", lambda *given: made.append(given))
    w = world(heads=(memory := Forgetful()))
    for number in range(640):
        w.send(get(f"/{number}"))
    assert len(made) == MAX_MISSES + 10
    assert len(memory._lines) == 2


class Forgetful(HeaderCache):
    """Recognises nothing."""

    def __init__(self) -> None:
        super().__init__(LIMIT)

    def find(self, data: bytes) -> Request | None:
        return None
