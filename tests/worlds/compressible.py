"""A trained model that quantizes well, as a bundle without an export, and its recipe as a file: digits that are drawn
from prototypes with noise. `WORDS` of the recipe are replaced to break it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from onnx import helper
from torch import nn

from trueline.bundle import Bundle, Dim, Golden, Signature
from trueline.recipe.contract import Recipe
from worlds.bundles import bundle, graph, spec

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

name = "drawn"
CLASSES, NOISE = 10, 0.35
RECORDS = {"training": 1000, "evaluation": 600, "prediction": 10}


def model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, CLASSES),
    )


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)


def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


def dataset(mode):
    draw = torch.Generator().manual_seed(0)
    prototypes = torch.rand(CLASSES, 1, 8, 8, generator=draw)
    draw.manual_seed(1 + len(mode))
    labels = torch.randint(0, CLASSES, (RECORDS[mode],), generator=draw)
    images = prototypes[labels] + NOISE * torch.randn(RECORDS[mode], 1, 8, 8, generator=draw)
    return TensorDataset(images, labels)


def metrics():
    return {"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels).float()}
"""
_trained: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
"""Weights by recipe and steps, which a run of tests trains once."""
BRIEF_RECIPE = RECIPE.replace('name = "drawn"', 'name = "drawn"\nepochs = 1')


@dataclass(frozen=True)
class Compressible:
    bundle: Bundle
    recipe: Path
    module: nn.Sequential


def make(folder: Path, *, recipe: str = RECIPE, steps: int = 60) -> Compressible:
    """Trains for `steps`; the recipe lies at folder/recipe.py, the bundle at folder/drawn.bundle."""
    from trueline.recipe.load import load_recipe

    file = folder / "recipe.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(recipe)
    loaded = load_recipe(file)
    torch.manual_seed(0)
    module = loaded.model()
    known = _trained.get((recipe, steps))
    if known is None:
        _train(module, loaded, steps)
        _trained[recipe, steps] = {name: value.clone() for name, value in module.state_dict().items()}
    else:
        module.load_state_dict(known)
    return Compressible(seal(module.eval(), folder / "drawn.bundle", loaded.digest), file, module)


def _train(module: nn.Module, loaded: Recipe, steps: int) -> None:
    optimizer = loaded.optimizer(module.parameters())
    images, labels = loaded.dataset("training").tensors
    for step in range(steps):
        chosen = torch.arange(step * 64, step * 64 + 64) % len(images)
        optimizer.zero_grad()
        loaded.loss(module(images[chosen]), labels[chosen]).backward()
        optimizer.step()


def seal(module: nn.Sequential, out: Path, recipe_digest: str) -> Bundle:
    """The bundle of the module in its present state."""
    weights = {name.replace(".", "_"): value.detach().numpy() for name, value in module.state_dict().items()}
    nodes = [
        helper.make_node("Conv", ["input", "0_weight", "0_bias"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="first_relu"),
        helper.make_node("Conv", ["b", "2_weight", "2_bias"], ["c"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"], name="second_relu"),
        helper.make_node("MaxPool", ["d"], ["e"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["e"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "6_weight", "6_bias"], ["output"], name="last", transB=1),
    ]
    x, y = spec("input", "batch", 1, 8, 8), spec("output", "batch", len(weights["6_bias"]))
    model = graph(nodes, [x], [y], weights)
    given = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        answer = module(given)
    golden = [Golden(case="3", inputs={"input": given.numpy()}, outputs={"output": answer.numpy()})]
    signature = Signature(inputs=(x,), outputs=(y,), dims={"batch": Dim()})
    return bundle(
        out, model, signature, golden, name="drawn", recipe_digest=recipe_digest, lineage={"recipe": {"name": "drawn"}}
    )


def images(count: int = 64, seed: int = 3) -> np.ndarray:
    """[count, 1, 8, 8] Random images."""
    return np.random.default_rng(seed).random((count, 1, 8, 8), np.float32)
