"""What every checkpoint store promises. Import the tests and define the fixture `place`; its seal is `seal`."""

import os

import pytest

from trueline.errors import StorageError

PARTS = [("body", [b"one ", memoryview(b"two")]), ("seal", [b"done"])]


def content(place, name, part):
    with place.fetch(name, part) as file:
        return file.read_bytes()


def breaking(error):
    yield "body", [b"half of it"]
    raise error


def test_what_was_put_is_fetched_as_it_was(place):
    place.write("step-1", PARTS)
    assert (place.names(), place.names(unfinished=True)) == (["step-1"], [])
    assert (content(place, "step-1", "body"), content(place, "step-1", "seal")) == (b"one two", b"done")


def test_a_part_may_be_filled_in_where_it_is_written_from(place):
    left = [bytes([number]) * 3_000_000 for number in range(7)]

    def fill(room):
        count = min(len(room), len(left[0])) if left else 0
        if count:
            room[:count], left[0] = left[0][:count], left[0][count:]
            left[:] = [one for one in left if one]
        return count

    place.write("step-1", [("body", fill), ("seal", [b"done"])])
    assert content(place, "step-1", "body") == b"".join(bytes([number]) * 3_000_000 for number in range(7))


def test_a_place_that_nobody_wrote_to_is_empty(place):
    assert (place.names(), place.names(unfinished=True)) == ([], [])


def test_a_name_that_is_put_again_is_replaced_whole(place):
    place.write("step-1", [("body", [b"old"]), ("aside", [b"old"]), ("seal", [b"old"])])
    place.write("step-1", PARTS)
    assert content(place, "step-1", "body") == b"one two"
    assert place.names() == ["step-1"]


@pytest.mark.parametrize("error", [OSError(28, os.strerror(28)), ValueError("broken"), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_nothing(place, error):
    place.write("step-1", PARTS)
    with pytest.raises((StorageError, ValueError, KeyboardInterrupt)):
        place.write("step-2", breaking(error))
    assert (place.names(), place.names(unfinished=True)) == (["step-1"], [])


def test_a_part_that_is_not_there_is_told_from_a_place_that_fails(place):
    place.write("step-1", PARTS)
    for name, part in (("step-1", "other"), ("step-2", "seal")):
        with pytest.raises(FileNotFoundError), place.fetch(name, part):
            pass


def test_what_is_removed_is_gone_and_may_be_removed_again(place):
    place.write("step-1", PARTS)
    place.write("step-2", PARTS)
    place.remove("step-1")
    place.remove("step-1")
    assert (place.names(), place.names(unfinished=True)) == (["step-2"], [])
