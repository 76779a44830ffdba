"""What a host that could lead the job gets of its events: all lines, once, in pieces."""

import json

from trueline.train.master import publisher
from trueline.train.master.publisher import EventPublisher


def numbers(pieces) -> list[int]:
    return [json.loads(line)["fields"]["n"] for line in b"".join(pieces).splitlines()]


def test_the_history_and_what_comes_after_it_are_all_events_once_whole_lines_and_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(publisher, "PIECE", 100)
    first = EventPublisher(tmp_path / "events.jsonl")
    first.publish([("a.happened", {"n": number}) for number in range(10)])
    later: list[bytes] = []
    second = EventPublisher(tmp_path / "events.jsonl")  # the next master
    second.publish([("a.happened", {"n": 10})])
    past = list(second.read_history())
    second.replicate = later.append
    second.publish([("a.happened", {"n": 11}), ("a.happened", {"n": 12})])
    assert len(past) > 5
    assert max(map(len, past)) <= 100
    assert numbers([*past, *later]) == list(range(13))


def test_of_a_long_history_the_newest_whole_lines_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(publisher, "MOST_HISTORY", 250)
    made = EventPublisher(tmp_path / "events.jsonl")
    made.publish([("a.happened", {"n": number}) for number in range(50)])
    found = numbers(made.read_history())
    assert found == list(range(found[0], 50))
    assert 1 < len(found) < 10


def test_lines_that_a_full_disk_did_not_take_are_in_the_history(tmp_path):
    (tmp_path / "events.jsonl").mkdir()  # cannot be written
    made = EventPublisher(tmp_path / "events.jsonl")
    made.publish([("a.happened", {"n": 0})])
    assert numbers(made.read_history()) == [0]
