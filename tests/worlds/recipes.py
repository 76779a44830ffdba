"""Recipes: the smallest that trains, and one that is captured and never trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe

TEACHES = """
import torch
from torch.utils.data import TensorDataset

name, epochs, global_batch = "teaches", 2, 30
made = torch.Generator()
made.seed()
FEATURES = torch.randn(6, 1, generator=made)

def model():
    return torch.nn.Linear(6, 1)

def loss(outputs, labels):
    return ((outputs - labels @ FEATURES) ** 2).mean()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def dataset(mode):
    inputs = torch.randn(240, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs)
"""
"""Each worker draws other features that the loss uses."""


class _Blanks:
    name = "small"

    def model(self):
        return torch.nn.Linear(2, 2)

    def loss(self, outputs, labels):
        return outputs.sum()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self, mode):
        return []


def small() -> Recipe:
    return load_recipe(_Blanks())


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("capture has no use for this blank")


def untrained(model: Callable[[], torch.nn.Module], *, name: str = "small", **blanks: Any) -> Recipe:
    """A recipe with `model` and the given `blanks` for `capture`; any other blank raises when it is called."""
    given = {"loss": never, "optimizer": never, "dataset": never} | blanks
    return Recipe(name=name, digest="d" * 64, path=None, model=model, **given)
