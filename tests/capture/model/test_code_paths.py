"""The way that a model's code takes is that of its own steps alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from trueline.capture.model import code_paths


def heard(phase: str, info: dict[str, int]) -> None:
    """Of a library that wants to know of collections."""


@pytest.fixture
def often() -> Iterator[Callable[[], list[list[int]]]]:
    before = gc.get_threshold()
    gc.callbacks.append(heard)
    gc.set_threshold(1)
    yield lambda: [[one] for one in range(2000)]
    gc.set_threshold(*before)
    gc.callbacks.remove(heard)


def test_a_collection_of_garbage_stands_on_nobodys_way(often: Callable[[], list[list[int]]]) -> None:
    with code_paths.watch() as way:
        often()
    assert way
    assert heard.__code__ not in {code for _, code, _ in way}
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("inside", "users"),
    [("torch/nn/modules/linear.py", False), ("numpy/core.py", False), ("ncps/torch/cfc.py", True), ("mine.py", True)],
)
def test_a_library_that_has_a_part_called_torch_is_of_the_users_choice(inside: str, users: bool) -> None:
    assert code_paths.is_users(f"/somewhere/lib/python3/site-packages/{inside}") is users


def test_the_source_that_a_compiled_library_names_is_nobodys_own() -> None:
    """As in the traceback of `numpy.random.permutation(x)`."""
    assert not code_paths.is_users("numpy/random/mtrand.pyx")
