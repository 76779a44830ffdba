"""Promises of files past the page cache: the same bytes as in any other file, also where there is no such way."""

import errno
import fcntl
import os
import threading

import pytest

from trueline.storage import direct_file
from trueline.storage.direct_file import ALIGNMENT, DirectFile

DATA = os.urandom(5 * ALIGNMENT + 77)


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch):
    monkeypatch.setattr(direct_file, "BUFFER_BYTES", 2 * ALIGNMENT)


def write(path, *parts):
    with path.open("wb", buffering=0) as file:
        direct = DirectFile(file)
        for part in parts:
            direct.write(part)
        direct.flush()
    return path.read_bytes()


@pytest.mark.parametrize("cut", [0, 1, ALIGNMENT, len(DATA)])
def test_a_file_has_the_bytes_that_were_written_in_their_order(tmp_path, cut):
    assert write(tmp_path / "file", DATA[:cut], memoryview(DATA)[cut:]) == DATA


def test_large_parts_of_a_file_do_not_pass_the_page_cache(tmp_path, monkeypatch):
    written, plain = [], os.write

    def note(handle, data):
        written.append((len(data), bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)))
        return plain(handle, data)

    monkeypatch.setattr(direct_file.os, "write", note)
    assert write(tmp_path / "file", DATA) == DATA
    sizes, past = zip(*written, strict=True)
    assert sizes == (2 * ALIGNMENT, 2 * ALIGNMENT, ALIGNMENT, 77)
    if not any(past):
        pytest.skip("this file system has no O_DIRECT")
    assert past == (True, True, True, False), "only the end of a file does"


def test_where_the_system_refuses_it_the_page_cache_is_used(tmp_path, monkeypatch):
    plain = os.write

    def refuse(handle, data):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(handle, data)

    monkeypatch.setattr(direct_file.os, "write", refuse)
    assert write(tmp_path / "file", DATA) == DATA


@pytest.mark.parametrize("count", [1, ALIGNMENT])
def test_a_write_that_takes_a_part_is_continued(tmp_path, monkeypatch, count):
    plain = os.write
    monkeypatch.setattr(
        direct_file.os, "write", lambda handle, data: plain(handle, data[:count] if len(data) > 1 else data)
    )
    assert write(tmp_path / "file", DATA[: 3 * ALIGNMENT]) == DATA[: 3 * ALIGNMENT]


@pytest.mark.parametrize("most", [1, 100, ALIGNMENT + 1, 9 * ALIGNMENT])
def test_what_fills_a_file_puts_its_bytes_where_they_are_written_from(tmp_path, monkeypatch, most):
    monkeypatch.setattr(direct_file, "_idle_buffers", [])
    left, rooms = DATA, []

    def fill(room):
        nonlocal left
        rooms.append((room.obj, len(room)))
        count = min(most, len(left), len(room))
        room[:count], left = left[:count], left[count:]
        return count

    with DirectFile((tmp_path / "file").open("wb", buffering=0)) as direct:
        direct.write(DATA[:10])
        direct.write_from(fill)
        direct.flush()
    assert (tmp_path / "file").read_bytes() == DATA[:10] + DATA
    assert len({id(buffer) for buffer, _ in rooms}) == 2
    assert rooms[0][1] == 2 * ALIGNMENT - 10


def test_a_file_takes_the_buffers_of_one_that_was_closed_and_of_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_file, "_idle_buffers", idle := [])
    monkeypatch.setattr(direct_file, "KEPT_BUFFERS", 5)

    def open_and_write(name):
        direct = DirectFile((tmp_path / name).open("wb", buffering=0))
        direct.write(DATA)
        return direct, {id(direct._buffer), id(direct._spare)}

    first, buffers = open_and_write("first")
    second, others = open_and_write("second")
    assert len(buffers | others) == 4
    first.close()
    first.close()
    third, again = open_and_write("third")
    fourth, new = open_and_write("fourth")
    assert (again, len(new | again | others)) == (buffers, 6)
    for direct in (second, third, fourth):
        direct.flush()
        direct.close()
    assert {(tmp_path / name).read_bytes() for name in ("second", "third", "fourth")} == {DATA}
    assert len({id(buffer) for buffer in idle}) == len(idle) == 5, "and no more than so many are kept"


def test_a_fork_does_not_share_buffers_with_its_parent():
    buffer = direct_file.make_buffer(ALIGNMENT)
    child = os.fork()
    if child == 0:
        buffer[:1] = b"x"
        os._exit(0)
    os.waitpid(child, 0)
    assert buffer[:1] == b"\0"


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct_file.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", DATA)


def test_a_buffer_is_filled_while_the_one_before_is_on_its_way_to_the_disk(tmp_path, monkeypatch):
    went_on, plain = threading.Event(), os.write

    def wait(handle, data):
        assert went_on.wait(60), "the writer waits for the disk"
        return plain(handle, data)

    monkeypatch.setattr(direct_file.os, "write", wait)
    path = tmp_path / "file"
    with DirectFile(path.open("wb", buffering=0)) as direct:
        direct.write(DATA[: 2 * ALIGNMENT])  # a buffer
        direct.write(DATA[2 * ALIGNMENT : 3 * ALIGNMENT])
        went_on.set()
        direct.write(DATA[3 * ALIGNMENT :])
        direct.flush()
    assert path.read_bytes() == DATA


def test_an_error_of_the_disk_meets_the_next_buffer_or_the_flush(tmp_path, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct_file.os, "write", full)
    with DirectFile((tmp_path / "file").open("wb", buffering=0)) as direct:
        direct.write(DATA[: 2 * ALIGNMENT])
        with pytest.raises(OSError, match="No space left"):
            direct.write(DATA[: 2 * ALIGNMENT])
    with DirectFile((tmp_path / "file").open("wb", buffering=0)) as direct:
        direct.write(DATA[: 2 * ALIGNMENT])
        with pytest.raises(OSError, match="No space left"):
            direct.flush()


def test_a_file_is_closed_after_its_last_write_has_ended(tmp_path, monkeypatch):
    """A write to a descriptor that was closed may meet another file."""
    plain, order = os.write, []

    def note(handle, data):
        count = plain(handle, data)
        order.append("written")
        return count

    monkeypatch.setattr(direct_file.os, "write", note)
    file = (tmp_path / "file").open("wb", buffering=0)
    with DirectFile(file) as direct:
        direct.write(DATA[: 2 * ALIGNMENT])  # and what fills it ends early
    assert (order, file.closed) == (["written"], True)


def test_an_interpreter_that_ends_writes_without_a_thread(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(direct_file.ThreadPoolExecutor, "submit", refuse)
    assert write(tmp_path / "file", DATA) == DATA


def test_parts_that_begin_at_a_page_are_read_again_in_place(tmp_path):
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        direct = DirectFile(file)
        places = []
        for part in (DATA[:100], DATA[:ALIGNMENT], DATA):
            places.append(direct.align())
            direct.write(part)
        direct.align()
        direct.flush()
        assert places == [0, ALIGNMENT, 2 * ALIGNMENT]
        room = memoryview(direct_file.make_buffer(6 * ALIGNMENT))
        assert direct.read(room, places[2]) == 6 * ALIGNMENT
        assert bytes(room[: len(DATA)]) == DATA
        assert direct.read(room[:8], places[1]) == 8
        assert bytes(room[:8]) == DATA[:8]
