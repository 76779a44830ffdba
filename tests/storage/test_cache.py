"""A block in the cache is what was fetched, to the byte, or it is fetched again; what was used last stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trueline import files
from trueline.storage.cache import BlockCache

CONTENT = bytes(range(200))


def never() -> bytes:
    raise AssertionError("it lies in the cache")


def blocks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??/*"))


@pytest.mark.parametrize("at", [0, 1, 100, 199, 200, 203, 204, 211])
def test_one_changed_bit_anywhere_in_a_block_has_it_fetched_again(tmp_path: Path, at: int) -> None:
    BlockCache(tmp_path, 10**6).get("key", 0, lambda: CONTENT)
    (path,) = blocks(tmp_path)
    content = bytearray(path.read_bytes())
    assert len(content) == 212
    content[at] ^= 1
    path.write_bytes(content)
    cache = BlockCache(tmp_path, 10**6)
    assert cache.peek("key", 0) is None
    assert bytes(cache.get("key", 0, lambda: CONTENT)) == CONTENT
    assert bytes(BlockCache(tmp_path, 10**6).get("key", 0, never)) == CONTENT


@pytest.mark.parametrize("size", [0, 5, 12, 100, 211])
def test_a_block_that_is_torn_is_fetched_again(tmp_path: Path, size: int) -> None:
    BlockCache(tmp_path, 10**6).get("key", 0, lambda: CONTENT)
    (path,) = blocks(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    assert bytes(BlockCache(tmp_path, 10**6).get("key", 0, lambda: CONTENT)) == CONTENT


def test_each_block_of_each_object_has_a_place_of_its_own(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10**6)
    asked = [(key, block) for key in ("a", "b", "a?2") for block in (0, 1, 8, 9, 1024, 1025)]
    for key, block in asked:
        cache.get(key, block, lambda key=key, block=block: f"{key} {block}".encode())
    again = BlockCache(tmp_path, 10**6)
    assert [bytes(again.get(key, block, never)).decode() for key, block in asked] == [f"{k} {b}" for k, b in asked]
    assert len(blocks(tmp_path)) == len(asked)


def test_a_block_has_its_name_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[tuple[int, bool]] = []
    real = os.replace

    def watched(source: Any, target: Any) -> None:
        named.append((Path(source).stat().st_size, Path(target).exists()))
        real(source, target)

    monkeypatch.setattr(os, "replace", watched)
    BlockCache(tmp_path, 10**6).get("key", 0, lambda: CONTENT)
    assert named == [(212, False)]
    assert len(blocks(tmp_path)) == 1


def test_what_was_read_last_stays_when_room_is_made(tmp_path: Path) -> None:
    now = [0.0]

    def cache() -> BlockCache:
        """As another process has it, with nothing at hand."""
        return BlockCache(tmp_path, 1000, now=lambda: now[0])

    first = cache()
    for at, key in enumerate("abcd"):
        now[0] = at
        first.get(key, 0, lambda: bytes(300))
    now[0] = 4
    cache().get("a", 0, never)
    now[0] = 5
    first.get("e", 0, lambda: bytes(300))
    assert [key for key in "abcde" if cache().peek(key, 0) is not None] == ["a", "d", "e"]
    assert sum(size for _, size, _ in first._entries()) <= 1000


def test_what_a_writer_has_under_construction_stays_for_an_hour(tmp_path: Path) -> None:
    now = [10_000.0]
    (tmp_path / "ab").mkdir()
    for name, age in (("young", 3599.0), ("old", 3601.0)):
        part = tmp_path / "ab" / f"{files.PARTIAL}{name}"
        part.write_bytes(b"half")
        os.utime(part, (now[0] - age, now[0] - age))
    BlockCache(tmp_path, 10**6, now=lambda: now[0]).get("key", 0, lambda: CONTENT)
    assert [path.name for path in blocks(tmp_path) if path.name.startswith(files.PARTIAL)] == [f"{files.PARTIAL}young"]
