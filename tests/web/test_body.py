"""A body that arrives in pieces comes out whole; a long one is in a file that other processes can map."""

from __future__ import annotations

import gc
import os
import zlib
from pathlib import Path

import pytest

from trueline.web.body import SHARED_BYTES, BodyBuffer, MappedFile, SharedBody
from trueline.web.compression import Decompressor
from worlds.waiting import until


def fill(size: int, piece: int) -> tuple[BodyBuffer, bytes]:
    whole = bytes(at * 7 % 251 for at in range(1021)) * (size // 1021 + 1)
    whole = whole[:size]
    buffer = BodyBuffer()
    for at in range(0, size, piece):
        buffer.add(whole[at : at + piece])
    return buffer, whole


@pytest.mark.parametrize("size", [0, 1, 1000, SHARED_BYTES - 1, SHARED_BYTES, SHARED_BYTES + 1, 3 * SHARED_BYTES + 17])
@pytest.mark.parametrize("piece", [64 * 1024 - 1, 256 * 1024, 4 * SHARED_BYTES])
def test_a_body_comes_out_as_it_came_in_for_every_size_of_its_pieces(size: int, piece: int) -> None:
    buffer, whole = fill(size, piece)
    assert len(buffer) == size
    body = buffer.take()
    assert bytes(body) == whole
    assert isinstance(body, memoryview) == (size > SHARED_BYTES)
    assert len(buffer) == 0
    assert bytes(buffer.take()) == b""


def test_one_short_piece_is_the_body_itself_and_is_not_copied() -> None:
    buffer, piece = BodyBuffer(), b"x" * 100
    buffer.add(piece)
    assert buffer.take() is piece


def test_a_long_body_is_backed_by_a_file_that_lives_as_long_as_a_view_of_it() -> None:
    buffer, whole = fill(2 * SHARED_BYTES, 100_000)
    body = buffer.take()
    assert isinstance(body, memoryview)
    part, owner = body[1000:2000], body.obj
    assert isinstance(owner, SharedBody)
    assert os.pread(owner.descriptor, 10, 1000) == whole[1000:1010]
    del owner, body
    assert bytes(part) == whole[1000:2000]


def test_files_and_mappings_that_nobody_has_any_more_end_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each returns the memory of a whole body, which took the event loop 13 ms for 64 MiB."""
    closed: list[int | MappedFile] = []
    monkeypatch.setattr("trueline.web.body._CLOSER.close", closed.append)
    dropped, _ = fill(2 * SHARED_BYTES, 100_000)
    taken = fill(2 * SHARED_BYTES, 100_000)[0].take()
    assert closed == []
    del dropped
    assert len(closed) == 1
    part = taken[:10]
    del taken
    assert len(closed) == 1
    del part
    file, mapping = closed
    assert isinstance(file, int)
    assert isinstance(mapping, SharedBody)
    assert not mapping.closed
    descriptors = (file, mapping.descriptor)
    assert all("body" in str(Path(f"/proc/self/fd/{one}").readlink()) for one in descriptors)
    mapping.release()
    assert mapping.closed
    assert not Path(f"/proc/self/fd/{descriptors[1]}").exists()
    os.close(file)


def test_the_thread_that_ends_mappings_outlives_one_in_a_cycle_with_its_views() -> None:
    def cycle() -> int:
        body = fill(2 * SHARED_BYTES, 100_000)[0].take()
        assert isinstance(body, memoryview)
        held: list[object] = [body, body.obj]
        held.append(held)
        owner = body.obj
        assert isinstance(owner, SharedBody)
        return owner.descriptor

    descriptors = {cycle() for _ in range(3)}
    gc.collect()
    until(lambda: not any(is_body(one) for one in descriptors), "files of bodies in cycles are closed")


def is_body(descriptor: int) -> bool:
    try:
        return "body" in os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the thread closes it at any time
        return False


def test_a_machine_without_memory_for_a_body_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    buffer = BodyBuffer()
    monkeypatch.setattr("trueline.web.body.os.memfd_create", refuse)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        buffer.add(b"x" * (SHARED_BYTES + 1))


def test_a_long_body_is_decompressed_into_a_file() -> None:
    plain = b"0.125," * SHARED_BYTES
    body = Decompressor(zlib.compress(plain), "deflate", len(plain)).run()
    assert isinstance(body, memoryview)
    assert body == plain
