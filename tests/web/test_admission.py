"""One client does not shut out the others: neither with connections, nor with requests, nor with bytes."""

from __future__ import annotations

import pytest

from trueline.web.connection import IN_A_TURN, Connection
from trueline.web.messages import Response
from trueline.web.parser import HttpLimits, Waits, judge
from trueline.web.server import HttpServer
from worlds.connections import Clock, Echo, Wire, get, post

LONG = 100_000


class House:
    """A server with connections of several clients."""

    def __init__(self, limits: HttpLimits) -> None:
        self.clock = loop = Clock()
        self.app = Echo(loop=loop)  # type: ignore[arg-type]
        self.server = HttpServer(self.app, limits, loop, is_vital=lambda path: path == "/health")  # type: ignore[arg-type]

    def connect(self, client: str = "10.0.0.1", *, after_s: float = 1.0) -> tuple[Connection, Wire]:
        """A connection made some time later."""
        self.clock.now += after_s
        connection, wire = self.server(), Wire(client=client)
        connection.connection_made(wire)  # type: ignore[arg-type]
        return connection, wire

    def send(self, connection: Connection, data: bytes) -> None:
        connection.data_received(data)
        while self.clock.turn():
            pass


@pytest.fixture
def house() -> House:
    return House(HttpLimits(connections=4, spare=1, pipelined=4))


def statuses(wire: Wire) -> list[int]:
    return [int(part[:3]) for part in wire.written.split(b"HTTP/1.1 ")[1:]]


def test_a_new_connection_takes_the_place_of_the_one_that_was_idle_the_longest(house: House) -> None:
    idle = [house.connect() for _ in range(4)]
    house.send(idle[0][0], get())  # the second has been idle the longest now
    new, wire = house.connect()
    house.send(new, get())
    assert statuses(wire) == [200]
    assert [one.closed for _, one in idle] == [False, True, False, False]


def test_the_client_with_the_most_connections_loses_them_first(house: House) -> None:
    _, few = house.connect("10.0.0.2")
    many = [house.connect("10.0.0.1")[1] for _ in range(3)]
    house.connect("10.0.0.3")
    assert not few.closed
    assert [one.closed for one in many] == [True, False, False]


def test_half_a_head_holds_no_place_either(house: House) -> None:
    for _ in range(4):
        house.send(house.connect()[0], b"GET / HTTP/1.1\r\nhost")
    new, wire = house.connect()
    house.send(new, get())
    assert statuses(wire) == [200]


def test_with_requests_on_all_connections_health_is_answered_and_the_rest_refused(house: House) -> None:
    for _ in range(4):
        house.send(house.connect()[0], get("/later"))
    extra, wire = house.connect()
    house.send(extra, get("/health"))
    house.send(extra, get("/a"))
    assert statuses(wire) == [200, 503]
    assert wire.closed
    assert b"4 connections" in wire.written


def test_beyond_the_spare_connections_all_are_refused_until_one_has_gone(house: House) -> None:
    busy = [house.connect()[0] for _ in range(4)]
    for connection in busy:
        house.send(connection, get("/later"))
    spare, _ = house.connect()
    house.send(spare, get("/health"))
    house.send(spare, get("/later"))  # refused, and this connection closes
    _, refused = house.connect()
    assert statuses(refused) == [503]
    spare.connection_lost(None)
    busy[0].connection_lost(None)
    again, wire = house.connect()
    house.send(again, get())
    assert statuses(wire) == [200]


def test_a_thousand_requests_in_one_piece_leave_others_their_turn_and_are_all_answered(house: House) -> None:
    many, wire = house.connect()
    other, beside = house.connect()
    many.data_received(b"".join(get(f"/{number}") for number in range(1000)))
    assert len(statuses(wire)) <= IN_A_TURN
    other.data_received(get())
    assert statuses(beside) == [200]
    assert not wire.reading
    while house.clock.turn():
        pass
    assert statuses(wire) == [200] * 1000
    assert [request.path for request in house.app.seen if request.path != "/a"] == [f"/{n}" for n in range(1000)]
    assert wire.reading


def test_no_more_than_a_few_bodies_are_read_ahead_of_their_answer() -> None:
    house = House(HttpLimits())
    connection, wire = house.connect()
    house.send(connection, get("/later"))
    sent = 0
    while wire.reading and sent < 100:
        house.send(connection, post(b"x" * LONG))
        sent += 1
    assert 5 < sent < 20
    assert house.server.buffered == sent * LONG
    house.app.later[0].set_result(Response(200, b""))
    house.send(connection, b"")
    assert statuses(wire) == [200] * (1 + sent)
    assert wire.reading


def test_bodies_that_never_end_give_way_when_they_fill_the_memory() -> None:
    house = House(HttpLimits(body_bytes=10 * LONG))
    limit = house.server.limits.buffered_bytes
    held: list[Wire] = []
    head = b"POST /a HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % (10 * LONG)
    while house.server.buffered + 9 * LONG <= limit:
        connection, wire = house.connect()
        house.send(connection, head + b"x" * 9 * LONG)
        held.append(wire)
    late, wire = house.connect(after_s=5.0)
    house.send(late, post(b"x" * 10 * LONG))
    assert statuses(wire) == [200]
    assert [statuses(one) for one in held[:3]] == [[503], [503], []], "for its body, and for its answer"
    assert house.server.buffered <= limit


def test_a_body_that_finds_no_room_is_refused_and_says_how_much_there_is() -> None:
    house = House(HttpLimits(body_bytes=10 * LONG))
    house.server.buffered = house.server.limits.buffered_bytes
    connection, wire = house.connect()
    house.send(connection, post(b"x" * LONG))
    assert statuses(wire) == [503]
    assert str(house.server.limits.buffered_bytes).encode() in wire.written
    other, beside = house.connect()
    house.send(other, post(b"x" * 1000))
    assert statuses(beside) == [200]


def test_the_memory_of_a_body_is_free_again_when_its_request_is_answered_or_its_client_gone() -> None:
    house = House(HttpLimits(body_bytes=10 * LONG))
    connection, _ = house.connect()
    house.send(connection, post(b"x" * LONG))
    assert house.server.buffered == 0
    house.send(connection, post(b"x" * LONG, path="/later"))
    assert house.server.buffered == LONG
    connection.connection_lost(None)
    assert house.server.buffered == 0


@pytest.mark.parametrize(
    ("waits", "until"),
    [
        (Waits(receiving=0.0, in_head=True, silent=0.0), 10.0),
        (Waits(receiving=0.0, received_bytes=10**9, silent=5.0), 25.0),
    ],
)
def test_a_head_has_ten_seconds_and_a_body_twenty_from_one_byte_to_the_next(waits: Waits, until: float) -> None:
    limits = HttpLimits()
    assert [judge(waits, now, limits) for now in (until, until + 0.001)] == ["keep", "refuse"]
