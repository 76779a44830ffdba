"""Embeddings with `max_norm` as tables that are short enough already.

`nn.Embedding(max_norm=…)` shortens the rows that it looks up, in place and for good, so that a call writes into a
parameter, which no served program does. What a row is after its first use it stays: all rows are shortened before the
capture. Where something else reads the table too, its answers depend on what was looked up before: it stays as it is,
and is refused as a model that changes itself.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trueline import events
from trueline.capture.model import code_paths
from trueline.capture.model.arguments import as_arguments
from trueline.errors import join_names
from trueline.recipe.eager_mode import as_trained

_CLOSE = 1e-5
"""Relative: a row that is shortened twice may lose a last digit again."""


def shorten_rows(module: nn.Module, batches: Sequence[Any]) -> None:
    """Shortens the tables of `module` that have a `max_norm`, if the model then answers `batches` as before."""
    names = [name for name, part in module.named_modules() if _has_bound(part)]
    if not names or any("weight" in one.__code__.co_names for one in code_paths.users_functions(module)):
        return
    tables = [module.get_submodule(name) for name in names]
    shared = [one for part in module.modules() for one in part._parameters.values()]
    if any(sum(one is table.weight for one in shared) > 1 for table in tables):
        return
    short = copy.deepcopy(module)
    _shorten([short.get_submodule(name) for name in names])
    if all(_agree(copy.deepcopy(module), short, batch) for batch in batches):
        _shorten(tables)
        events.emit("rows.shortened", tables=join_names(names))


def _has_bound(part: nn.Module) -> bool:
    return isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None


def _shorten(tables: Sequence[Any]) -> None:
    with torch.no_grad():
        for table in tables:
            rows = torch.arange(table.num_embeddings, device=table.weight.device)
            torch.embedding_renorm_(table.weight, rows, table.max_norm, table.norm_type)
            table.max_norm = None


def _agree(one: nn.Module, other: nn.Module, batch: Any) -> bool:
    try:
        answers = [_answer(model, copy.deepcopy(batch)) for model in (one, other)]
        pairs = zip(*answers, strict=True)
        return all(torch.allclose(a, b, rtol=_CLOSE, atol=_CLOSE * _largest(a), equal_nan=True) for a, b in pairs)
    except Exception:  # noqa: BLE001 - what the user's forward raises, the capture itself says with its line
        return False


def _answer(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    call = as_arguments(batch)
    with torch.no_grad(), as_trained():
        return [leaf for leaf in tree_leaves(model(*call.args, **call.kwargs)) if isinstance(leaf, torch.Tensor)]


def _largest(value: torch.Tensor) -> float:
    return float(value.double().abs().max()) if value.numel() else 0.0
