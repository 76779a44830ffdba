"""Keys of attention that stay in rows: what turns them for the product with the queries becomes a part of that product.

A program moves keys from [batch, keys, heads, size] to [batch, heads, size, keys] at once. In int8 OpenVINO copies that
byte by byte, which takes ten times as long as a move of whole rows. As two moves, of the heads and of the last two
axes, the second is a setting of its multiplication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper

_ROUNDS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def keep_rows(model: Any) -> None:
    """Splits, in `model`, each Transpose that makes the last axis the last but one and whose result is only the second
    factor of multiplications. The answers stay."""
    graph = model.graph
    readers: dict[str, list[Any]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    sizes = {one.name: int(np.prod(one.dims)) for one in graph.initializer}
    returned, changed = {one.name for one in graph.output}, set[str]()
    swaps: dict[str, Any] = {}
    for node in graph.node:
        order = _order_of(node)
        turned = _follow(node.output[0], readers, sizes) if _turns_rows(order) else []
        if turned and not returned.intersection(turned):
            node.attribute[0].ints[:] = [*order[:-2], order[-1], order[-2]]
            swaps[turned[-1]] = _make_swap(turned[-1], len(order))
            changed.update(turned)
    nodes = []
    for node in graph.node:
        for at, name in enumerate(node.input):
            if name in swaps:
                node.input[at] = swaps[name].output[0]
        nodes += [node, *(swaps[name] for name in node.output if name in swaps)]
    del graph.node[:]
    graph.node.extend(nodes)
    for one in [one for one in graph.value_info if one.name in changed]:
        graph.value_info.remove(one)  # it has the shape from before


def _order_of(node: Any) -> list[int]:
    """The order of the axes that a Transpose names; empty for other nodes."""
    return list(node.attribute[0].ints) if node.op_type == "Transpose" and len(node.attribute) == 1 else []


def _turns_rows(order: Sequence[int]) -> bool:
    """Whether the last axis becomes the last but one, and others move too."""
    return len(order) > 2 and order[-2] == len(order) - 1 and [*order[:-2], order[-1]] != [*range(len(order) - 1)]


def _follow(name: str, readers: Mapping[str, Sequence[Any]], sizes: Mapping[str, int]) -> list[str]:
    """`name` and what rounding by one scale makes of it, up to the second factor of multiplications; empty: it is used
    in another way."""
    found = [name]
    while len(readers[name]) == 1 and readers[name][0].op_type in _ROUNDS:
        node = readers[name][0]
        if name != node.input[0] or sizes.get(node.input[1]) != 1:
            return []
        name = node.output[0]
        found.append(name)
    used = readers[name]
    factors = all(one.op_type == "MatMul" and list(one.input).index(name) == 1 for one in used)
    return found if used and factors else []


def _make_swap(name: str, rank: int) -> Any:
    order = [*range(rank - 2), rank - 1, rank - 2]
    return helper.make_node("Transpose", [name], [f"{name}.swapped"], f"{name}.swap", perm=order)
