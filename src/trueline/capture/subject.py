"""What is captured: the model in evaluation mode, its oracle, and examples of what it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from trueline.errors import DataError, RecipeError
from trueline.runtime.eager import EagerSession
from trueline.state.checkpoint import load_model
from trueline.state.place import Where

if TYPE_CHECKING:
    from trueline.data.source import Source
    from trueline.recipe.contract import Mode, Recipe

NUM_EXAMPLES = 5
"""Records of the example batch:

a prime, so that it is seldom equal to another size of the model by chance.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to capture. `data` says where its examples come from."""

    module: torch.nn.Module
    eager: EagerSession
    data: dict[str, str | int]


def prepare(recipe: Recipe, checkpoint: Where | None) -> Subject:
    """Loads the model and its examples. Raises RecipeError, CheckpointError, DataError, CaptureError."""
    module = load_model(recipe, checkpoint).cpu().eval()
    inputs, data = _examples(recipe)
    return Subject(module=module, eager=EagerSession(module, inputs), data=data)


def _examples(recipe: Recipe) -> tuple[Any, dict[str, str | int]]:
    if recipe.examples is not None:
        return _as_tensors(recipe.examples()), {"examples": "recipe.examples()"}
    source, mode = _source(recipe)
    count = min(NUM_EXAMPLES, source.num_records)
    inputs = source.read(np.arange(count, dtype=np.int64)).inputs
    facts: dict[str, str | int] = {
        "examples": f"first {count} records",
        "mode": mode,
        "num_records": source.num_records,
        "fingerprint": source.fingerprint(),
    }
    return _as_tensors(inputs), facts


def _source(recipe: Recipe) -> tuple[Source, Mode]:
    modes: tuple[Mode, ...] = ("evaluation", "training")
    why: list[str] = []
    for mode in modes:
        try:
            source = recipe.source(mode)
        except (DataError, RecipeError) as error:
            why.append(f"{mode}: {error.message}")
            continue
        if source.num_records:
            return source, mode
        why.append(f"{mode}: no records")
    raise RecipeError(
        f"recipe '{recipe.name}' gives no example to capture with ({'; '.join(why)})",
        hint="define examples() -> inputs of a small batch",
    )


def _as_tensors(inputs: Any) -> Any:
    """numpy arrays as tensors, through tuples, lists and dicts."""

    def change(leaf: Any) -> Any:
        return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf

    return pytree.tree_map(change, inputs)
