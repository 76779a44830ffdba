"""One connection's long bodies leave other connections their turn on the loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trueline.web.connection import LONG_BYTES, PIECE_BYTES
from trueline.web.server import SWEPT_IN_A_TURN
from worlds.connections import LIMITS, Wire, World, get, post, world

WIDE = replace(LIMITS, body_bytes=2**24)
PART = 4 * LONG_BYTES


def long_world() -> World:
    return world(WIDE)


def test_a_long_body_is_read_once_in_each_turn_of_the_loop() -> None:
    opened = long_world()
    whole = post(b"x" * (10 * PART))
    pieces = [whole[at : at + PART] for at in range(0, len(whole), PART)]
    for piece in pieces[:-1]:
        opened.connection.data_received(piece)
        assert not opened.wire.reading
        assert opened.clock.turn()
        assert opened.wire.reading
    opened.send(pieces[-1])
    assert opened.wire.written.endswith(b"POST /a " + b"x" * (10 * PART))
    assert opened.wire.reading


def test_a_short_body_is_read_as_it_comes() -> None:
    opened = long_world()
    whole = post(b"x" * (LONG_BYTES // 2))
    opened.connection.data_received(whole[:1000])
    assert opened.wire.reading
    assert opened.clock.due == []


def test_a_long_response_is_written_in_parts_with_a_turn_of_the_loop_between_two() -> None:
    opened = long_world()
    body = bytes(range(256)) * (PART // 64)
    opened.connection.data_received(post(body)[:-1])
    while opened.clock.turn():
        pass
    opened.connection.data_received(body[-1:])
    sizes = [len(opened.wire.written)]
    while opened.clock.turn():
        sizes.append(len(opened.wire.written))
    assert max(after - before for before, after in zip([0, *sizes], sizes, strict=False)) <= PART + 300
    assert len(sizes) >= 4
    assert opened.wire.written.endswith(body)


def test_a_long_response_waits_for_a_slow_client_and_then_goes_on() -> None:
    opened = long_world()
    body = b"y" * (6 * PART)
    opened.connection.data_received(post(body))
    opened.connection.pause_writing()
    while opened.clock.turn():
        pass
    stopped = len(opened.wire.written)
    assert stopped < len(body)
    assert not opened.clock.turn()
    assert len(opened.wire.written) == stopped
    opened.connection.resume_writing()
    while opened.clock.turn():
        pass
    assert opened.wire.written.endswith(body)


def test_the_next_request_is_answered_after_all_of_a_long_response() -> None:
    opened = long_world()
    body = b"z" * (3 * PART)
    written = opened.send(post(body) + get("/second"))
    assert written.index(b"GET /second ") > written.index(body) + len(body)
    assert opened.wire.answers() == 2


def test_a_connection_that_is_to_close_closes_after_the_last_part() -> None:
    opened = long_world()
    body = b"z" * (3 * PART)
    opened.connection.data_received(post(body, "connection: close"))
    assert not opened.wire.closed
    while opened.clock.turn():
        pass
    assert opened.wire.closed
    assert opened.wire.written.endswith(body)


def test_requests_behind_a_long_body_are_read_ahead_in_short_pieces_as_others_are() -> None:
    """A body is parsed in long pieces; what follows it in the same bytes is not."""
    opened = long_world()
    opened.connection.data_received(post(b"x" * (3 * LONG_BYTES)) + get() * 3000)
    ahead = PIECE_BYTES // len(get()) + 1
    assert len(opened.connection._waiting) <= WIDE.pipelined + ahead
    while opened.clock.turn():
        pass
    assert opened.wire.answers() == 3001


def test_connections_over_a_time_limit_end_some_in_each_turn_of_the_loop() -> None:
    """2,000 idle connections do not hold up a request for as long as it takes to look at all of them."""
    opened = world(replace(WIDE, connections=2000, idle_s=5))
    wires = [opened.wire]
    for _ in range(3 * SWEPT_IN_A_TURN):
        wires.append(Wire())
        opened.server().connection_made(wires[-1])  # type: ignore[arg-type]
    opened.clock.now += 6
    opened.server.sweep()
    closed = [sum(one.closed for one in wires)]
    while opened.clock.turn():
        closed.append(sum(one.closed for one in wires))
    assert closed == [SWEPT_IN_A_TURN, 2 * SWEPT_IN_A_TURN, 3 * SWEPT_IN_A_TURN, len(wires)]


@pytest.mark.parametrize(("bytes_per_s", "cut"), [(2**10, True), (2**17, False)])
def test_a_client_that_reads_a_long_response_by_drops_is_cut_off_and_a_slow_one_is_not(
    bytes_per_s: int, cut: bool
) -> None:
    """Each drop is progress; the whole answer would stay in memory for hours."""
    opened = world(replace(WIDE, slowest_bytes_per_s=2**16))
    body = b"y" * (20 * PART)
    opened.connection.data_received(post(body))
    while opened.clock.turn():
        opened.connection.pause_writing()
        assert opened.server.buffered >= len(body) - len(opened.wire.written) or opened.wire.closed
        opened.clock.now += min(WIDE.write_s - 1, PART / bytes_per_s)
        opened.server.sweep()
        if opened.wire.aborted:
            break
        opened.connection.resume_writing()
    assert opened.wire.aborted == cut
    assert opened.wire.written.endswith(body) != cut


def test_answers_that_wait_for_their_clients_count_towards_the_bytes_that_a_server_holds() -> None:
    opened = long_world()
    body = b"y" * (20 * PART)
    opened.connection.data_received(post(body))
    assert opened.server.buffered >= len(body)
    while opened.clock.turn():
        pass
    assert opened.wire.written.endswith(body)
    assert opened.server.buffered == 0
