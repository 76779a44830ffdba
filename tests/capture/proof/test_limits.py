"""What a capture sets aside from Python's collector comes back to it."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from trueline.capture.proof import limits
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


IN_A_NEW_THREAD = """
import threading, torch
from trueline.capture.proof import limits

torch.set_num_threads(4)
value = torch.zeros(1 << 20)

def work():
    with limits.bounded_memory(1 << 20):
        value.add_(1)

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(value.sum().item())
"""


@pytest.mark.slow
def test_a_bound_that_leaves_no_memory_for_a_thread_does_not_end_the_process():
    """libgomp starts threads with the first operator that a thread computes, and ends a process that it cannot."""
    ended = subprocess.run([sys.executable, "-c", IN_A_NEW_THREAD], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "1048576.0\n"), ended.stderr


@pytest.mark.jobs
def test_a_large_program_that_refers_to_itself_is_freed_with_its_memory() -> None:
    class Program:
        def __init__(self) -> None:
            self.itself = self

    for weights, freed in ((0, False), (limits.COLLECTED_BYTES + 1, True)):
        program = Program()
        seen = weakref.ref(program)
        del program
        gc.disable()
        try:
            limits.release_memory(weights)
        finally:
            gc.enable()
        assert (seen() is None) is freed
