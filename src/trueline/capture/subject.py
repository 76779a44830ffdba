"""What is captured: the model in evaluation mode, its oracle, and examples of what it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


NUM_LOOKED_AT = 4
"""Further records, spread over the data, that are looked at for dimensions in which records differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to capture. `data` says where its examples come from."""

    module: torch.nn.Module
    eager: EagerSession
    data: dict[str, str | int]


def prepare(
    recipe: Recipe, checkpoint: Where | None, *, dynamic_shapes: Mapping[str, Mapping[int, Any]] | None = None
) -> Subject:
    """Loads the model and its examples. `dynamic_shapes` adds to what the recipe declares.

    Raises RecipeError, CheckpointError, DataError, CaptureError.
    """
    module = load_model(recipe, checkpoint).cpu().eval()
    batches, data = _examples(recipe)
    declared = dict(recipe.dynamic_shapes()) if recipe.dynamic_shapes is not None else {}
    for name, axes in (dynamic_shapes or {}).items():
        declared[name] = {**axes, **declared.get(name, {})}
    eager = EagerSession(module, batches[0], others=batches[1:], dynamic_shapes=declared)
    return Subject(module=module, eager=eager, data=data)


def _examples(recipe: Recipe) -> tuple[list[Any], dict[str, str | int]]:
    """Batches of examples: dimensions in which they differ are free."""
    if recipe.examples is not None:
        return _given(recipe), {"examples": "recipe.examples()"}
    source, mode = _source(recipe)
    count = min(NUM_EXAMPLES, source.num_records)
    ends = np.linspace(0, source.num_records - 1, NUM_LOOKED_AT).round()
    alone = [np.array([index], dtype=np.int64) for index in dict.fromkeys(int(end) for end in ends)]
    batches = [source.read(indices).inputs for indices in (np.arange(count, dtype=np.int64), *alone)]
    facts: dict[str, str | int] = {
        "examples": f"first {count} records",
        "mode": mode,
        "num_records": source.num_records,
        "fingerprint": source.fingerprint(),
    }
    return [_as_tensors(batch) for batch in batches], facts


def _given(recipe: Recipe) -> list[Any]:
    """What examples() returned, or each of the batches that it yielded."""
    assert recipe.examples is not None
    found = recipe.examples()
    batches = list(found) if isinstance(found, Iterator) else [found]
    if not batches:
        raise RecipeError(f"recipe '{recipe.name}': examples() yielded nothing", hint="yield at least one small batch")
    return [_as_tensors(batch) for batch in batches]


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
