"""Generators of numpy and `random` that code seeds are noted with the line, however the code seeds them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest

from trueline.train.step.parts.seeded_generators import NotedSeeds, SeededGenerator, note_seeds


def of_a_context(seed: int) -> float:
    before = np.random.get_state()
    np.random.seed(seed)
    drawn = float(np.random.normal())
    np.random.set_state(before)
    return drawn


def of_the_global(seed: int) -> float:
    np.random.seed(seed)
    return float(np.random.normal())


def of_python(seed: int) -> float:
    random.seed(seed)
    return random.gauss(0.0, 1.0)


KINDS: list[Callable[[int], float]] = [
    lambda seed: float(np.random.default_rng(seed).normal()),
    lambda seed: float(np.random.Generator(np.random.Philox(seed)).normal()),
    lambda seed: float(np.random.RandomState(seed).normal()),
    lambda seed: random.Random(seed).random(),
    of_a_context,
    of_the_global,
    of_python,
]


def note(draw: Callable[[int], float], seed: int) -> list[SeededGenerator]:
    noted = NotedSeeds()
    plain, before = draw(seed), (np.random.PCG64, np.random.seed, random.Random.seed, random.seed)
    with note_seeds(noted):
        noted.begin()
        assert draw(seed) == plain
        assert noted.were_used()
    assert (np.random.PCG64, np.random.seed, random.Random.seed, random.seed) == before
    return noted.end()[0]


@pytest.mark.parametrize("draw", KINDS)
def test_a_seed_is_noted_with_its_line_and_shows_whether_two_are_the_same_and_something_was_drawn(draw):
    (one,), (again,), (other,) = (note(draw, seed) for seed in (3, 3, 4))
    assert one.line.startswith("test_seeded_generators.py:")
    assert one == again
    assert one.seeded not in (one.ended, other.seeded)


def test_a_generator_that_was_seeded_before_shows_by_its_state_that_it_was_used():
    own = np.random.default_rng(0)
    noted = NotedSeeds([own])
    noted.begin()
    assert not noted.were_used()
    own.bit_generator.state = np.random.PCG64(5).state
    assert noted.were_used()
    ended = noted.end()[1][-1]
    assert (ended.seeded, ended.line) == ((), "")


def test_meanwhile_generators_are_of_numpys_classes_and_can_be_pickled():
    with note_seeds(NotedSeeds()):
        own = np.random.default_rng(1)
        assert isinstance(own.bit_generator, np.random.PCG64)
        assert isinstance(np.random.mtrand._rand._bit_generator, np.random.MT19937)
        copied = pickle.loads(pickle.dumps(own))
    assert type(copied.bit_generator) is np.random.PCG64
    assert copied.normal() == own.normal()
