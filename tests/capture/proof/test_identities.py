"""What is computed of an identity or a hash, a generator that each call makes anew, a database: not of the inputs."""

from __future__ import annotations

import random
import sqlite3
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import Unsteady, check_rare
from worlds import marks


class TakesARemainder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if id(x) % 4096 == 16 else x  # remainder


class TakesBitsOfAHash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if hash(self) >> 4 & 1023 == 7 else x  # bits


class KeepsOncePerObject(nn.Module):
    """An identity tells one object from another, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        done: dict[int, Tensor] = {}
        for layer in [*self.layers, *self.layers]:
            if id(layer) not in done:
                x = done[id(layer)] = layer(x)
        return x if id(done) != id(x) else -x


class DrawsAnew(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if random.Random().random() < 1e-7 else x  # anew


class DrawsByName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if Random().randint(0, 10**9) == 7 else x  # by name


class DrawsAnewInNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if np.random.default_rng().random() < 1e-7 else x  # anew in numpy


class DrawsAnewInTheOldWay(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if np.random.RandomState().rand() < 1e-7 else x  # in the old way


class SeedsAnew(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.seed() % 100_003 == 5 else x  # seeds


class DrawsFromASeed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kinds: Any = (random.Random(3), np.random.default_rng(3), np.random.RandomState(3))
        assert isinstance(kinds[0], random.Random)
        assert isinstance(kinds[2], np.random.RandomState)
        return x * 2 if kinds[0].random() < 0.5 or kinds[1].random() < 0.5 or kinds[2].rand() < 0.1 else x


class AsksABase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = sqlite3.connect(":memory:", check_same_thread=False)
        self.base.execute("create table calls(n)")

    def forward(self, x: Tensor) -> Tensor:
        self.base.execute("insert into calls values(1)")  # a base
        return x * 2 if self.base.total_changes > 10**6 else x


class KeepsABase(AsksABase):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def find_unsteady(model: type[nn.Module]) -> Unsteady | None:
    torch.manual_seed(0)
    return check_rare(EagerSession(model().eval(), torch.randn(3, 4)))


@pytest.mark.parametrize(
    ("model", "words", "mark"),
    [
        (TakesARemainder, "(id): it answers differently when", "remainder"),
        (TakesBitsOfAHash, "(hash): it answers differently when", "bits"),
        (DrawsAnew, "draws random numbers outside of torch (Random), and it answers differently when", "anew"),
        (DrawsByName, "draws random numbers outside of torch (Random), and it answers differently when", "by name"),
        (DrawsAnewInNumpy, "default_rng), and it answers differently when", "anew in numpy"),
        (DrawsAnewInTheOldWay, "RandomState), and it answers differently when", "in the old way"),
        (SeedsAnew, "(seed): it answers differently when", "seeds"),
        (AsksABase, "attribute base: it asks a database, whose content can change", "a base"),
    ],
)
def test_what_is_none_of_the_inputs_is_refused_with_its_line(model: type[nn.Module], words: str, mark: str) -> None:
    found = find_unsteady(model)
    assert found is not None
    assert words in found.why
    assert marks.place_of(__file__, mark) in str(found.place)


@pytest.mark.parametrize("model", [KeepsOncePerObject, DrawsFromASeed, KeepsABase])
def test_an_identity_a_seed_and_a_base_that_decide_nothing_do_no_harm(model: type[nn.Module]) -> None:
    assert find_unsteady(model) is None


def test_generators_are_afterwards_as_they_were() -> None:
    before = random.Random, np.random.default_rng, np.random.RandomState, Random
    find_unsteady(DrawsAnew)
    find_unsteady(DrawsByName)
    assert before == (random.Random, np.random.default_rng, np.random.RandomState, Random)
    assert isinstance(random.Random(), random.Random)
