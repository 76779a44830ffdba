"""Frames: what is sent arrives, and what is no frame is refused before it can do harm."""

from __future__ import annotations

import select
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.ps.wire import HEAD, MAX_ARRAYS, Array, Call, EndCut, FrameError, Inbox, Outbox, PullReply, decode, encode

DTYPES = [np.float32, np.float16, np.int64, np.uint8]


def join(*args: object, **options: object) -> memoryview:
    return memoryview(bytearray(b"".join(encode(*args, **options))))  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=3)), max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_a_frame_comes_back_whatever_its_arrays_are(arrays: list[tuple[type, list[int]]], number: int) -> None:
    random = np.random.default_rng(0)
    given_arrays: list[Array] = [(random.random(shape) * 100).astype(dtype) for dtype, shape in arrays]
    frame = decode(join(Call.PULL, number, EndCut(number), given_arrays))
    assert (frame.kind, frame.number, frame.read(EndCut).id) == (Call.PULL, number, number)
    for one, other in zip(given_arrays, frame.arrays, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_a_value_only(at: int, change: int) -> None:
    data = join(Call.PULL, 1, EndCut(3), [np.arange(20), np.ones((3, 4), np.float32)])
    data[at % len(data)] ^= change
    try:
        frame = decode(data)
        frame.read(EndCut)
    except FrameError:
        return
    assert sum(one.nbytes for one in frame.arrays) <= len(data)


def test_a_head_that_claims_too_much_is_refused_before_memory_is_taken() -> None:
    here, there = socket.socketpair()
    with here, there:
        head = bytearray(join(Call.PULL, 1)[: HEAD.size])
        for claim in (MAX_ARRAYS + 8, 7):  # too much, and no multiple of 8
            there.sendall(HEAD.pack(bytes(head[:4]), Call.PULL, 1, 1, claim))
            with pytest.raises(FrameError, match=r"not the head"):
                Inbox().receive(here)


def test_arrays_that_are_not_contiguous_are_sent_as_they_read() -> None:
    array = np.arange(12).reshape(3, 4).T
    np.testing.assert_array_equal(decode(join(Call.OK, 1, None, [array])).arrays[0], array)


def test_text_is_no_array() -> None:
    with pytest.raises(ValueError, match="carries no <U1"):
        encode(Call.OK, 1, None, [np.array(["a"])])


def test_a_message_of_another_type_is_refused() -> None:
    with pytest.raises(FrameError, match="PullReply"):
        decode(join(Call.OK, 1, "text")).read(PullReply)


def test_frames_of_all_sizes_pass_through_one_connection_in_order() -> None:
    here, there = socket.socketpair()
    there.setblocking(False)
    sizes = [0, 1, 100_000, 3, 500_000, 0]

    def send() -> None:
        outbox = Outbox()
        for number, size in enumerate(sizes):
            outbox.add(encode(Call.PUSH, number, None, [np.full(size, number, np.float32)] * 3))
        while not outbox.send(there):
            select.select([], [there], [], 10)

    with here, there:
        sender = threading.Thread(target=send)
        sender.start()
        inbox = Inbox()
        for number, size in enumerate(sizes):
            frame = inbox.receive(here)
            assert frame is not None
            assert frame.number == number
            assert [one.tolist() for one in frame.arrays] == [[number] * size] * 3
        sender.join()


def test_the_buffer_is_used_again_unless_it_is_detached() -> None:
    here, there = socket.socketpair()
    with here, there:
        inbox = Inbox()

        def receive(value: int) -> Array:
            there.sendall(join(Call.PUSH, 1, None, [np.full(3, value)]))
            frame = inbox.receive(here)
            assert frame is not None
            return frame.arrays[0]

        first = receive(1)
        second = receive(2)
        assert first.tolist() == second.tolist() == [2, 2, 2]
        inbox.detach()
        receive(3)
        assert second.tolist() == [2, 2, 2]


def test_what_is_left_to_send_can_be_copied() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    with here, there:
        array = np.zeros(2_000_000)
        outbox = Outbox()
        outbox.add(encode(Call.OK, 1, None, [array]))
        assert not outbox.send(here)
        outbox.copy_rest()
        array[:] = 1
        inbox = Inbox()
        there.setblocking(False)
        frame = None
        while frame is None:
            outbox.send(here)
            frame = inbox.receive(there)
        assert not frame.arrays[0].any()
