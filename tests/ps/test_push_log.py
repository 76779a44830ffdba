"""The push log and snapshots: what was appended is there after any end of the process; what is torn is named."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from trueline.errors import StorageError
from trueline.ps.server import push_log, snapshot
from trueline.ps.server.push_log import PushLog, read_log
from trueline.ps.wire import Array, Call, EndCut, ReceivedFrame, decode, encode


def frame(number: int) -> memoryview:
    arrays = [np.full(600, number, np.float32), np.arange(3)]
    return memoryview(bytearray(b"".join(encode(Call.PUSH, number, EndCut(number), arrays))))


def recover(folder: Path) -> tuple[list[int], list[snapshot.Header], PushLog]:
    """Numbers of the frames, headers of the snapshot, and the log to append to."""
    frames: list[ReceivedFrame] = []
    headers = []
    log = PushLog(folder)
    log.recover(lambda header, arrays: headers.append(header), frames.append)
    for one in frames:
        assert one.arrays[0].tolist() == [one.number] * 600
        assert one.read(EndCut).id == one.number
    return [one.number for one in frames], headers, log


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of three frames."""
    _, _, log = recover(tmp_path)
    for number in range(3):
        log.append(frame(number))
    log.close()
    return tmp_path


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can be longer than 4,000 bytes; that of pytest's own output may be, once this ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_frames_come_back_in_their_order(folder: Path) -> None:
    numbers, headers, log = recover(folder)
    log.append(frame(3))
    log.close()
    assert (numbers, headers) == ([0, 1, 2], [])
    assert recover(folder)[0] == [0, 1, 2, 3]


@pytest.mark.parametrize("kept", [1, push_log.ENTRY.size - 1, push_log.ENTRY.size, push_log.ENTRY.size + 100])
def test_a_torn_tail_is_left_out_and_written_over(folder: Path, kept: int) -> None:
    path = folder / "log-0"
    entry = push_log.ENTRY.size + len(frame(2))
    path.write_bytes(path.read_bytes()[: 2 * entry + kept])
    numbers, _, log = recover(folder)
    assert numbers == [0, 1]
    log.append(frame(5))
    log.close()
    assert recover(folder)[0] == [0, 1, 5]


@pytest.mark.parametrize("at", [3, 17, 30, 500, 2000])
def test_a_torn_middle_is_named(folder: Path, at: int) -> None:
    path = folder / "log-0"
    data = bytearray(path.read_bytes())
    data[at + push_log.ENTRY.size + len(frame(0))] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=rf"log-0 is torn at byte {push_log.ENTRY.size + len(frame(0))}"):
        recover(folder)


def test_a_log_that_is_missing_between_others_is_named(folder: Path) -> None:
    (folder / "log-0").rename(folder / "log-2")
    (folder / "log-4").write_bytes(b"")
    with pytest.raises(StorageError, match="lacks a log"):
        recover(folder)


@full_disk()
def test_what_a_full_disk_does_not_take_leaves_no_trace(tmp_path: Path) -> None:
    _, _, log = recover(tmp_path)
    log.append(frame(0))
    size = (tmp_path / "log-0").stat().st_size
    with pytest.raises(StorageError, match="log-0"):
        log.append(frame(1))
    assert (tmp_path / "log-0").stat().st_size == size == log.size
    log.close()
    assert recover(tmp_path)[0] == [0]


def test_a_snapshot_takes_the_place_of_the_log_before_it(folder: Path) -> None:
    _, _, log = recover(folder)
    arrays: list[Array] = [np.arange(5)]
    log.begin_snapshot(lambda: ({"a": 1}, arrays))
    log.append(frame(7))  # while it is written
    log.end_snapshot()
    log.close()
    assert sorted(path.name for path in folder.iterdir()) == ["log-1", "log-spare", "snapshot-1"]
    numbers, headers, _ = recover(folder)
    assert (numbers, headers) == ([7], [{"a": 1}])


@pytest.fixture
def reused(folder: Path) -> Path:
    """Two frames in `log-2`, which is the file of an earlier log of six frames of the same size."""
    _, _, log = recover(folder)
    for number in (3, 4, 5):
        log.append(frame(number))
    for _ in range(2):
        log.begin_snapshot(lambda: ({}, []))
        log.end_snapshot()
    log.append(frame(20))
    log.append(frame(21))
    log.close()
    assert (folder / "log-2").stat().st_size == 6 * (push_log.ENTRY.size + len(frame(0)))
    return folder


def test_what_an_earlier_log_left_in_the_file_is_not_read(reused: Path) -> None:
    numbers, _, log = recover(reused)
    log.append(frame(22))
    log.close()
    assert numbers == [20, 21]
    assert recover(reused)[0] == [20, 21, 22]


@pytest.mark.parametrize("kept", [0, 1, 9, 17, 21, push_log.ENTRY.size, push_log.ENTRY.size + 100, 2400])
def test_a_write_that_was_cut_short_over_an_earlier_log_is_left_out(reused: Path, kept: int) -> None:
    path, entry = reused / "log-2", push_log.ENTRY.size + len(frame(0))
    whole, earlier = path.read_bytes(), path.read_bytes()[2 * entry : 3 * entry]
    path.write_bytes(whole[: entry + kept] + earlier[kept:] + whole[2 * entry :])
    numbers, _, log = recover(reused)
    assert numbers == [20]
    log.append(frame(30))
    log.close()
    assert recover(reused)[0] == [20, 30]


@pytest.mark.parametrize("at", [3, 17, 21, 30, 2000])
def test_a_torn_middle_over_an_earlier_log_is_named(reused: Path, at: int) -> None:
    path = reused / "log-2"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match="log-2 is torn at byte 0"):
        recover(reused)


def test_a_log_that_another_follows_has_nothing_of_an_earlier_one(reused: Path) -> None:
    def fail() -> tuple[snapshot.Header, list[Array]]:
        raise MemoryError

    _, _, log = recover(reused)
    log.begin_snapshot(fail)
    with pytest.raises(StorageError, match="snapshot-3"):
        log.end_snapshot()
    log.append(frame(40))
    log.close()
    assert recover(reused)[0] == [20, 21, 40]


@full_disk()
def test_the_file_that_is_kept_to_be_written_over_gives_way_on_a_full_disk(tmp_path: Path) -> None:
    _, _, log = recover(tmp_path)
    log.append(frame(0))
    log.begin_snapshot(lambda: ({}, []))
    log.end_snapshot()
    log.append(frame(1))
    assert (tmp_path / "log-spare").exists()
    with pytest.raises(StorageError, match="log-1"):
        log.append(frame(2))
    assert not (tmp_path / "log-spare").exists()
    log.close()
    assert recover(tmp_path)[0] == [1]


def test_without_its_snapshot_all_logs_count(folder: Path) -> None:
    _, _, log = recover(folder)

    def fail() -> tuple[snapshot.Header, list[Array]]:
        raise MemoryError

    log.begin_snapshot(fail)
    log.append(frame(3))
    with pytest.raises(StorageError, match="snapshot-1"):
        log.end_snapshot()
    log.close()
    numbers, headers, log = recover(folder)
    assert (numbers, headers) == ([0, 1, 2, 3], [])
    log.close()


def test_a_frame_that_is_taken_back_is_gone(folder: Path) -> None:
    _, _, log = recover(folder)
    log.append(frame(3))
    log.take_back(len(frame(3)))
    log.append(frame(4))
    log.close()
    assert [one.number for one, _ in read_log(folder / "log-0", last=True)] == [0, 1, 2, 4]


def test_a_snapshot_comes_back_and_may_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "snapshot-1"
    arrays: list[Array] = [np.arange(10_000).reshape(100, 100), np.empty((0, 4), np.float32), np.ones(3, np.float16)]
    snapshot.write(path, {"rows": 3}, arrays)
    header, found = snapshot.read(path)
    assert header == {"rows": 3}
    for one, other in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(one, other)
    found[0][0, 0] = 5
    assert snapshot.read(path)[1][0][0, 0] == 0


@pytest.mark.parametrize("at", [0, 30, 200, 70_000, -100, -3])
def test_a_snapshot_that_was_changed_is_named(tmp_path: Path, at: int) -> None:
    path = tmp_path / "snapshot-1"
    snapshot.write(path, {"rows": 3}, [np.arange(10_000)])
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(StorageError, match="snapshot-1 is torn"):
        snapshot.read(path)


@pytest.mark.parametrize("left", [0, 10, 40_000])
def test_a_snapshot_that_was_cut_is_named(tmp_path: Path, left: int) -> None:
    path = tmp_path / "snapshot-1"
    snapshot.write(path, {"rows": 3}, [np.arange(10_000)])
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(StorageError, match="snapshot-1"):
        snapshot.read(path)
    path.unlink()
    with pytest.raises(StorageError, match="snapshot-1 is missing"):
        snapshot.read(path)


def test_the_checksum_sees_pages_that_changed_places() -> None:
    data = np.random.default_rng(0).integers(0, 2**63, 4096, dtype=np.int64)
    other = np.concatenate([data[512:1024], data[:512], data[1024:]])
    assert snapshot.sum_words(data.data.cast("B")) != snapshot.sum_words(other.data.cast("B"))


def test_frames_on_the_disk_are_those_of_the_wire(folder: Path) -> None:
    data = memoryview((folder / "log-0").read_bytes())[push_log.ENTRY.size :]
    assert decode(data[: len(frame(0))]).data == frame(0)
