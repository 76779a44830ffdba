"""Fewer attention heads: rows of the projections to queries, keys and values, columns of the projection behind them.

A head is a slice of these projections, so an attention block gets smaller inside and keeps its width outside. Which
slices those are is not read from a model's class, of which there are hundreds: a layout is tried, and taken only if the
smaller model answers as the whole one whose removed heads contribute zero. Where key-value heads are shared by several
query heads, they go together. Source: Michel et al., arXiv 1905.10650.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from trueline.capture.model.arguments import as_arguments
from trueline.compress.derive.smaller_attention import SmallerAttention
from trueline.errors import CaptureError
from trueline.recipe.eager_mode import as_trained

_HEADS = ("num_heads", "n_heads", "num_attention_heads", "nhead", "n_head", "heads", "h")
_DIMS = ("head_dim", "head_size", "attention_head_size")
_SHARED = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_CLOSE = 1e-4
"""Relative difference of answers that counts as none."""
Kept = Mapping[str, Sequence[int]]
"""Name of an attention module -> its heads that stay (groups of them where key-value heads are shared)."""


@dataclass(frozen=True, slots=True)
class HeadsLayout:
    """`heads`: how many there are to choose from, of `total` query heads; `rows`: projections whose output rows are
    heads; `columns`: the projection behind. `fused`: blocks of queries, keys and values in one projection; `outer`:
    whether the heads are its outer index."""

    heads: int
    total: int
    rows: tuple[str, ...]
    columns: str
    fused: int = 1
    outer: bool = False


def choose_heads(model: nn.Module, example: Any, share: float) -> dict[str, list[int]]:
    """The heads that stay when each attention block loses the `share` of its heads that weigh least, for the blocks
    where that is proven. At least one stays."""
    kept: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in kept):
            continue
        for layout in _list_layouts(model, name, module):
            count = min(layout.heads - 1, int(layout.heads * share))
            if count < 1:
                break
            stay = sorted(_weigh(model, name, layout).argsort(descending=True)[: layout.heads - count].tolist())
            if _is_proven(model, example, name, layout, stay):
                kept[name] = stay
                break
    return kept


def remove_heads(model: nn.Module, example: Any, kept: Kept) -> nn.Module:
    """`model` without the heads that `kept` lacks, as `choose_heads` has proven it."""
    for name, stay in kept.items():
        module = model.get_submodule(name)
        for layout in _list_layouts(model, name, module):
            if _is_proven(model, example, name, layout, stay):
                _cut(model, name, layout, stay)
                break
        else:
            raise CaptureError(
                f"the plan removes heads of '{name}', and the model has no such attention block",
                hint="the recipe's model has changed: write the plan again",
            )
    return model


def _list_layouts(model: nn.Module, name: str, module: nn.Module) -> Iterator[HeadsLayout]:
    """Ways in which `module` may keep its heads, the usual ones first."""
    if isinstance(module, nn.MultiheadAttention):
        if module.bias_k is None and not module.add_zero_attn:
            yield HeadsLayout(module.num_heads, module.num_heads, (), "")
        return
    layers = {one: layer for one, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    for behind in _list_behind(model, name, layers):
        width = model.get_submodule(behind).get_parameter("weight").shape[1]
        heads = _read_count(module, _HEADS) or width // (_read_count(module, _DIMS) or width)
        if heads < 2 or width % heads:
            continue
        inside = {one: layer.weight.shape[0] for one, layer in layers.items() if f"{name}.{one}".strip(".") != behind}
        shared = _read_count(module, _SHARED) or min(
            (rows * heads // width for rows in inside.values() if rows <= width), default=heads
        )
        if 0 < shared <= heads and heads % shared == 0:
            yield from _list_projections(inside, behind, width, heads, shared)


def _list_projections(
    inside: Mapping[str, int], behind: str, width: int, heads: int, shared: int
) -> Iterator[HeadsLayout]:
    apart = tuple(one for one, size in inside.items() if size in (width, width // heads * shared))
    if len(apart) >= 3:
        yield HeadsLayout(shared, heads, apart[:3], behind)
    for one, size in inside.items():
        if size == 3 * width:
            yield HeadsLayout(heads, heads, (one,), behind, fused=3)
            yield HeadsLayout(heads, heads, (one,), behind, fused=3, outer=True)
        query = next((other for other, rows in inside.items() if rows == width), None)
        if size == 2 * width and query is not None:
            yield HeadsLayout(heads, heads, (query, one), behind, fused=2)


def _read_count(module: nn.Module, names: Sequence[str]) -> int:
    values = (getattr(module, one, None) for one in names)
    return next((value for value in values if isinstance(value, int) and _is_count(value)), 0)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _list_behind(model: nn.Module, name: str, layers: Mapping[str, nn.Linear]) -> Iterator[str]:
    """The linear layers that may take the heads together: the last ones inside, then those beside the module."""
    for one in reversed(list(layers)):
        yield f"{name}.{one}".strip(".")
    parent = name.rpartition(".")[0]
    if not name:
        return
    for one, layer in model.get_submodule(parent).named_modules():
        full = f"{parent}.{one}".strip(".")
        if isinstance(layer, nn.Linear) and not full.startswith(f"{name}."):
            yield full


def _weigh(model: nn.Module, name: str, layout: HeadsLayout) -> torch.Tensor:
    """[heads] How much each head can move the answer: the norm of its columns behind times that of its values."""
    module = model.get_submodule(name)
    if isinstance(module, nn.MultiheadAttention):
        whole = SmallerAttention.of(module, range(module.num_heads))
        values, columns = whole.v_proj.weight, whole.out_proj.weight
    else:
        columns = model.get_submodule(layout.columns).get_parameter("weight")
        rows = module.get_submodule(layout.rows[-1]).get_parameter("weight")
        blocks = _index(len(rows), layout, range(layout.heads))[-1] if layout.rows else None
        values = rows if blocks is None else rows[blocks]
    behind = columns.detach().T.reshape(layout.heads, -1).norm(dim=1)
    return cast("torch.Tensor", behind * values.detach().reshape(layout.heads, -1).norm(dim=1))


def _index(rows: int, layout: HeadsLayout, stay: Sequence[int] | range) -> list[torch.Tensor]:
    """The rows of each block of queries, keys or values in a projection, of the heads that stay."""
    fused = layout.fused if rows else 1
    places = torch.arange(rows)
    if layout.outer:
        split = places.reshape(layout.heads, fused, -1)
        return [split[list(stay), block].flatten() for block in range(fused)]
    split = places.reshape(fused, layout.heads, -1)
    return [split[block, list(stay)].flatten() for block in range(fused)]


def _cut(model: nn.Module, name: str, layout: HeadsLayout, stay: Sequence[int]) -> None:
    module = model.get_submodule(name)
    if isinstance(module, nn.MultiheadAttention):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, SmallerAttention.of(module, stay))
        return
    behind = model.get_submodule(layout.columns)
    width = behind.get_parameter("weight").shape[1]
    for one in layout.rows:
        layer = module.get_submodule(one)
        total = layer.get_parameter("weight").shape[0]
        alone = layout.fused > 1 and total == width
        plain = _plain(layout) if alone else layout
        blocks = _index(total, plain, stay)
        found = torch.cat(blocks) if not layout.outer else torch.stack(
            [block.reshape(len(stay), -1) for block in blocks], dim=1
        ).flatten()  # fmt: skip
        _keep_rows(layer, found)
    [columns] = _index(width, _plain(layout), stay)
    _keep_columns(behind, columns)
    _set_counts(module, layout, width, len(stay))


def _plain(layout: HeadsLayout) -> HeadsLayout:
    """Of a projection with one block of heads."""
    return HeadsLayout(layout.heads, layout.total, (), "")


def _keep_rows(layer: Any, places: torch.Tensor) -> None:
    layer.weight = nn.Parameter(layer.weight.detach()[places].clone(), requires_grad=layer.weight.requires_grad)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[places].clone(), requires_grad=layer.bias.requires_grad)
    layer.out_features = len(places)


def _keep_columns(layer: Any, places: torch.Tensor) -> None:
    layer.weight = nn.Parameter(layer.weight.detach()[:, places].clone(), requires_grad=layer.weight.requires_grad)
    layer.in_features = len(places)


def _set_counts(module: nn.Module, layout: HeadsLayout, width: int, left: int) -> None:
    """The module's own numbers of heads, and of their elements together."""
    for name, value in list(vars(module).items()):
        if not _is_count(value):
            continue
        if name in _HEADS and value == layout.total:
            setattr(module, name, layout.total * left // layout.heads)
        elif name in _SHARED and value == layout.heads:
            setattr(module, name, left)
        elif value == width and name not in _HEADS:
            setattr(module, name, width * left // layout.heads)


def _is_proven(model: nn.Module, example: Any, name: str, layout: HeadsLayout, stay: Sequence[int]) -> bool:
    """Whether the smaller model answers as the whole one whose other heads contribute zero."""
    try:
        whole, smaller = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
        _silence(whole, name, layout, stay)
        _cut(smaller, name, layout, stay)
        return answers_alike(answer_of(whole, example), answer_of(smaller, example))
    except Exception:  # noqa: BLE001 - whatever a model does when its heads are none of these
        return False


def _silence(model: nn.Module, name: str, layout: HeadsLayout, stay: Sequence[int]) -> None:
    module = model.get_submodule(name)
    behind = module.out_proj if isinstance(module, nn.MultiheadAttention) else model.get_submodule(layout.columns)
    weight = cast("torch.Tensor", behind.weight)
    [kept] = _index(weight.shape[1], _plain(layout), stay)
    with torch.no_grad():
        mask = torch.zeros(weight.shape[1])
        mask[kept] = 1
        weight.mul_(mask)


def answers_alike(want: Sequence[torch.Tensor], have: Sequence[torch.Tensor]) -> bool:
    """Whether two models have answered the same, but for rounding."""
    return len(want) == len(have) and all(
        one.shape == other.shape and _gap(one, other) <= _CLOSE for one, other in zip(want, have, strict=True)
    )


def _gap(want: torch.Tensor, have: torch.Tensor) -> float:
    if not want.numel():
        return 0.0
    scale = max(float(want.double().abs().max()), 1e-12)
    return float((want.double() - have.double()).abs().max()) / scale


def answer_of(model: Callable[..., Any], example: Any) -> list[torch.Tensor]:
    """The tensors of real numbers that `model` returns."""
    arguments = as_arguments(example)
    with torch.no_grad(), as_trained():
        found = model(*arguments.args, **arguments.kwargs)
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(found)
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
    ]  # fmt: skip
