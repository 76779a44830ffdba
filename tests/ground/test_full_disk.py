"""What is written while the disk is full is there once it has room: whole lines, in their order, each once."""

import errno
import os
import threading

import pytest

from trueline import files, full_disk
from trueline.full_disk import PatientWriter, append_lines, write_when_room


class Disk:
    """Takes `room` bytes, then fails until `clear`."""

    def __init__(self, room: int) -> None:
        self.room, self.taken, self.tried = room, bytearray(), threading.Event()

    def write(self, data: bytes) -> int:
        count = min(self.room, len(data))
        if not count:
            self.tried.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.taken += data[:count]
        self.room -= count
        return count


def test_what_a_full_disk_does_not_take_is_written_in_order_once_there_is_room():
    disk = Disk(room=4)
    writer = PatientWriter(disk.write)
    writer.write(b"one\ntwo\n")
    writer.write(b"three\n")
    assert disk.taken == b"one\n"
    disk.tried.clear()
    assert disk.tried.wait(60), "the thread tries again"
    disk.room = 100
    writer.wait(60)
    assert disk.taken == b"one\ntwo\nthree\n"


def test_of_more_than_can_be_kept_the_newest_bytes_are(monkeypatch):
    monkeypatch.setattr(full_disk, "MOST_KEPT", 8)
    disk = Disk(room=0)
    writer = PatientWriter(disk.write)
    for line in (b"one\n", b"two\n", b"six\n"):
        writer.write(line)
    disk.room = 100
    writer.wait(60)
    assert disk.taken == b"two\nsix\n"


def test_another_failure_than_a_full_disk_is_not_waited_for():
    def fail(_: bytes) -> int:
        raise OSError(errno.EPIPE, "gone")

    PatientWriter(fail).wait()
    PatientWriter(fail).write(b"lost")


def test_lines_are_appended_whole_or_not_at_all(tmp_path, monkeypatch):
    path, disk, plain = tmp_path / "lines", Disk(room=6), os.write
    append_lines(path, b"first\n")
    monkeypatch.setattr(os, "write", lambda handle, data: plain(handle, data[: disk.write(data)]))
    with pytest.raises(OSError, match="No space"):
        append_lines(path, b"second\n")
    assert path.read_bytes() == b"first\n"
    disk.room = 100
    append_lines(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_line_that_a_dead_writer_tore_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"first\nsec")
    append_lines(path, b"third\n")
    assert path.read_bytes() == b"first\nsec\nthird\n"


def test_a_file_that_has_to_be_there_is_waited_for(tmp_path, monkeypatch):
    full, replace = [2], os.replace

    def fill(source, target):
        if full[0]:
            full[0] -= 1
            raise OSError(errno.ENOSPC, "full")
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", fill)
    assert write_when_room(tmp_path / "loss.json", b"{}")
    assert (tmp_path / "loss.json").read_bytes() == b"{}"
