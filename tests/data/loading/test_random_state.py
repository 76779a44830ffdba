"""Whatever is drawn from a global generator changes its state, however it is read."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from trueline.data.loading import random_state
from trueline.data.loading.random_state import generator_state
from trueline.data.loading.seeding import preserve_generators, seed_all

KINDS = {
    "a word of Python's": lambda: random.getrandbits(32),
    "a word of numpy's": lambda: np.random.randint(0, 2**32, dtype=np.uint32),
    "a word of torch's": lambda: torch.randint(2, (1,)),
    "a normal number of torch's": lambda: torch.randn(()),
    "a normal number of torch's in double precision": lambda: torch.randn((), dtype=torch.float64),
    "many normal numbers": lambda: torch.randn(20),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
}


@pytest.fixture(params=["where they lie", "whole"])
def read_so(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "whole":
        monkeypatch.setattr(random_state, "_PYTHON_PLACES", ())
        monkeypatch.setattr(random_state, "_torch_places", lambda address: ())


@pytest.mark.usefixtures("read_so")
@pytest.mark.parametrize("draw", KINDS.values(), ids=KINDS)
def test_each_of_many_draws_changes_the_state_until_it_is_seeded_again(draw: Callable[[], object]) -> None:
    with preserve_generators():
        seed_all(3)
        first = generator_state()
        for _ in range(1300):  # a generator makes its 624 words anew twice
            before = generator_state()
            assert generator_state() == before
            draw()
            assert generator_state() != before
        seed_all(3)
        assert generator_state() == first


@pytest.mark.usefixtures("read_so")
@pytest.mark.parametrize("count", [623, 624, 2 * 624])
@pytest.mark.parametrize("draw", list(KINDS.values())[:3], ids=list(KINDS)[:3])
def test_any_number_of_draws_is_seen(draw: Callable[[], object], count: int) -> None:
    """After 624 words the position is the same again."""
    with preserve_generators():
        before = generator_state()
        for _ in range(count):
            draw()
        assert generator_state() != before


def test_this_python_and_this_torch_hold_their_generators_as_they_are_read() -> None:
    assert random_state._PYTHON_PLACES
    assert random_state._torch_places(torch.default_generator._cdata)


def test_a_torch_that_holds_its_generator_otherwise_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_state, "_SEED", random_state._SEED + 1)
    find = random_state._torch_places.__wrapped__
    assert find(torch.default_generator._cdata), "another seed is found too"
    monkeypatch.setattr(random_state, "_shows", lambda *_: False)
    assert find(torch.default_generator._cdata) == ()
    assert find(0) == ()
