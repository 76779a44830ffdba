"""What a capture sets aside from Python's collector comes back to it."""

import gc
from collections.abc import Iterator

import pytest

from trueline.capture.proof.limits import set_aside


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    """The suite sets its own imports aside."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_was_there_before_a_capture_is_not_collected_in_it_and_is_afterwards() -> None:
    with set_aside():
        before = gc.get_freeze_count()
        assert before > 0
        with set_aside():
            made = [[0]]
        assert gc.get_freeze_count() >= before - 100
        assert any(one is made for one in gc.get_objects())
    assert gc.get_freeze_count() == 0


def test_what_the_caller_has_set_aside_stays_so() -> None:
    gc.freeze()
    with set_aside():
        pass
    assert gc.get_freeze_count() > 0
