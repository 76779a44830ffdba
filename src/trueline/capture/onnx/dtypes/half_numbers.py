"""Numbers beside tensors in half precision keep their digits where torch's do; torch.onnx rounds each to the tensor's
dtype: 3.3 becomes 3.296875 beside BF16.

torch's kernels for the CPU multiply and divide by the number in single precision, and round the answer alone. They do
so for a number of Python, for a size, and for a second operand with one element of another dtype. Sums, powers,
remainders and comparisons take the rounded number, as ONNX does: those stay as they are. Which do what is measured, and
in torch's `aten/src/ATen/native/cpu/BinaryOpsKernel.cpp` (`original_scalar_value`).

Here an operator that keeps the number gets its halves in single precision, and its answer is rounded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.onnx._internal.exporter import _fx_passes

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="casts around a product or quotient of halves and a number that is not one of theirs",
    helps=("x.bfloat16() * 3.3", "x.half().sum(1) / x.shape[1]"),
)
_ATEN = torch.ops.aten
_PASSES: Any = _fx_passes
_HALF = (torch.float16, torch.bfloat16)
_PRODUCTS = frozenset((
    *(_ATEN.mul.Tensor, _ATEN.mul.Scalar, _ATEN.multiply.Tensor, _ATEN.multiply.Scalar),
    *(_ATEN.div.Tensor, _ATEN.div.Scalar, _ATEN.divide.Tensor, _ATEN.divide.Scalar),
    *(_ATEN.true_divide.Tensor, _ATEN.true_divide.Scalar, _ATEN.div.Tensor_mode, _ATEN.div.Scalar_mode),
    *(_ATEN.divide.Tensor_mode, _ATEN.divide.Scalar_mode, _ATEN.floor_divide.default, _ATEN.floor_divide.Scalar),
))  # fmt: skip
"""Operators whose second operand may be a tensor of one element, too."""
_OTHERS = frozenset((
    *(_ATEN.lerp.Scalar, _ATEN.addcmul.default, _ATEN.addcdiv.default, _ATEN.softplus.default),
    *(_ATEN.baddbmm.default, _ATEN.addbmm.default),
))  # fmt: skip


@contextmanager
def keep_numbers() -> Iterator[None]:
    """In the block, torch.onnx writes the operators that keep a number's digits with halves in single precision."""
    promote = _PASSES.insert_type_promotion_nodes

    def widen_then_promote(module: torch.fx.GraphModule) -> None:
        for part in module.modules():
            if isinstance(part, torch.fx.GraphModule):
                _widen_all(part)
        promote(module)

    _PASSES.insert_type_promotion_nodes = widen_then_promote
    try:
        yield
    finally:
        _PASSES.insert_type_promotion_nodes = promote


def _widen_all(module: torch.fx.GraphModule) -> None:
    found = [node for node in module.graph.nodes if _keeps_number(node)]
    for node in found:
        _widen(module.graph, node)
    if found:
        module.recompile()


def _keeps_number(node: Node) -> bool:
    value = node.meta.get("val")
    if node.target not in _PRODUCTS | _OTHERS or not isinstance(value, torch.Tensor) or value.dtype not in _HALF:
        return False
    first, *others = (_value_of(one) for one in (*node.args, *node.kwargs.values()))
    is_half = isinstance(first, torch.Tensor) and first.dtype == value.dtype
    return is_half and any(_loses(one, value.dtype, node) for one in others)


def _value_of(argument: object) -> object:
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def _loses(number: object, kind: torch.dtype, node: Node) -> bool:
    """Whether `number` may have digits that one of `kind` has not."""
    if isinstance(number, torch.Tensor):
        is_single = all(isinstance(size, int) and size == 1 for size in number.shape)
        return is_single and number.dtype not in (kind, torch.bool) and node.target in _PRODUCTS
    if isinstance(number, torch.SymInt | torch.SymFloat):
        return True
    known = isinstance(number, int | float) and not isinstance(number, bool)
    return known and torch.tensor(number, dtype=torch.float64).to(kind).item() != number


def _widen(graph: Graph, node: Node) -> None:
    value = node.meta["val"]

    def cast(one: Node, kind: torch.dtype) -> Node:
        made = graph.call_function(_ATEN._to_copy.default, (one,), {"dtype": kind})
        made.meta = dict(node.meta) | {"val": one.meta["val"].to(kind)}
        return made

    with graph.inserting_before(node):
        halves = [one for one in node.all_input_nodes if getattr(one.meta.get("val"), "dtype", None) in _HALF]
        for one in halves:
            node.replace_input_with(one, cast(one, torch.float32))
    node.meta["val"] = value.to(torch.float32)
    with graph.inserting_after(node):
        narrow = cast(node, value.dtype)
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
