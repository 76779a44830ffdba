"""What waits for room on the disk, as the master tells it."""

import time

from trueline.train.master.room import DiskRoom


def test_a_wall_clock_that_is_set_back_changes_nothing_in_how_long_the_job_waited(monkeypatch, tmp_path):
    heard = []
    room = DiskRoom(lambda name, **fields: heard.append((name, fields)))
    monkeypatch.setattr(time, "time", lambda: 2_000_000.0)
    room.lack("journal", str(tmp_path), "No space left on device", "steps continue")
    room.lack("journal", str(tmp_path), "No space left on device", "steps continue")
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    room.gain("journal")
    room.gain("journal")
    assert [name for name, _ in heard] == ["disk.full", "disk.has_room"]
    assert 0 <= heard[1][1]["seconds"] < 1_000
