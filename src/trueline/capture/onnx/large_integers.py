"""Whole numbers that ONNX Runtime compares, adds or multiplies wrongly when they are large.

Extremes of INT64 (`Max`, `Min`, `Clip`, `Relu`, `Sign`)
    Compared in two halves, the lower one with a sign: 2**31 counts as less than 1, and `x.long().clamp(-4, 3)` of -3e9
    stays what it is, as an index too. Comparisons (`Less`) are right, so a choice by one takes the operator's place.
Extremes of INT64 along a dimension (`ReduceMax`, `ReduceMin`)
    Compared in the same way, for some shapes. `ArgMax` and `ArgMin` are right: the number at that place is taken.
Sums (`ReduceSum`)
    Added up as FP64, so that a sum beyond 2**53 loses digits, and one beyond the dtype does not wrap. Numbers are added
    in two halves, each of which is exact. Sums of what was a boolean are small.
Products (`ReduceProd`)
    As FP64, too: of at most MOST_FACTORS, one is multiplied after the other.
Powers (`Pow`)
    As FP64, too. Those to numbers that the program holds are multiplied; those of 2 wrap beyond 2**62,
    those of 0 are a comparison.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from trueline.capture.onnx.size_arithmetic import computes_size
from trueline.capture.patches import Patch
from trueline.errors import CaptureError

PATCH = Patch(
    issue="none found",
    versions="onnxruntime 1.31",
    cost="a comparison and a choice for each extreme, five operators for each sum of whole numbers",
    helps=("bins_clamped", "hash_sum"),
)
HALF = 2**32
MOST_FACTORS = 64
AT_MOST = 64
"""Operators that are looked at for whether a number is a size."""
_SIZES = ("Shape", "Size", "Constant")
_MOVES = ("Add", "Cast", "Concat", "Div", "Gather", "Mul", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze")
_NARROW = (ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)
"""2**36 of these add up to less than 2**53."""


def compute_exactly(model: ir.Model) -> None:
    """Rewrites `model` in place. Raises CaptureError for a product that ONNX Runtime cannot compute."""
    for number, node in enumerate(list(ir.traversal.RecursiveGraphIterator(model.graph))):
        kind = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
        rewrite = _REWRITES.get(node.op_type) if node.domain == "" and not computes_size(node) else None
        if rewrite is None or kind not in (ir.DataType.INT64, ir.DataType.INT32) or _is_of_sizes(node):
            continue
        if node.op_type in _EXTREMES and kind == ir.DataType.INT32:
            continue
        builder = _Builder(node, number, kind)
        rewrite(builder)
        builder.replace()


def _is_of_sizes(node: ir.Node) -> bool:
    """Whether its operands are sizes and constants, moved or calculated with."""
    left: list[ir.Value | None] = list(node.inputs)
    for _ in range(AT_MOST):
        if not left:
            return True
        value = left.pop()
        producer = None if value is None else value.producer()
        if value is None or value.const_value is not None or (producer is not None and producer.op_type in _SIZES):
            continue
        if producer is None or producer.op_type not in _MOVES:
            return False
        left.extend(producer.inputs)
    return False


class _Builder:
    """The operators that take the place of `node`."""

    def __init__(self, node: ir.Node, number: int, kind: ir.DataType) -> None:
        self.node, self.kind, self.made = node, kind, list[ir.Node]()
        self._number = number

    @property
    def inputs(self) -> list[ir.Value | None]:
        return list(self.node.inputs)

    def add(self, op: str, *inputs: ir.Value | None, to: Any = None, **attributes: Any) -> ir.Value:
        kind: ir.DataType = to or self.kind
        if op == "Cast":
            attributes["to"] = kind
        self.made.append(ir.node(op, list(inputs), attributes=attributes))
        found = self.made[-1].outputs[0]
        found.name, found.type = f"large_{self._number}_{len(self.made)}", ir.TensorType(kind)
        self.made[-1].metadata_props.update(self.node.metadata_props)
        return found

    def hold(self, value: int | list[int], kind: ir.DataType | None = None) -> ir.Value:
        kind = kind or self.kind
        return self.add("Constant", to=kind, value=ir.tensor(np.array(value, kind.numpy())))

    def choose(self, above: ir.Value, below: ir.Value, *, largest: bool) -> ir.Value:
        """The larger of two numbers, or the smaller."""
        less = self.add("Less", above, below, to=ir.DataType.BOOL)
        return self.add("Where", less, *((below, above) if largest else (above, below)))

    def replace(self) -> None:
        """The last operator returns what the node does."""
        if not self.made:
            return
        old, new, graph = self.node.outputs[0], self.made[-1].outputs[0], self.node.graph
        assert graph is not None
        new.shape = old.shape
        convenience.replace_nodes_and_values(graph, self.node, [self.node], self.made, [old], [new])


def _extreme(*, largest: bool) -> Callable[[_Builder], None]:
    def rewrite(builder: _Builder) -> None:
        found, *others = (value for value in builder.inputs if value is not None)
        for other in others:
            found = builder.choose(found, other, largest=largest)

    return rewrite


def _take_at(place: str) -> Callable[[_Builder], None]:
    def rewrite(builder: _Builder) -> None:
        given, *rest = builder.inputs
        axes = convenience.get_const_tensor(rest[0]) if rest and rest[0] is not None else None
        if given is None or given.shape is None or (axes is None and rest):
            return
        keeps = "keepdims" not in builder.node.attributes or bool(builder.node.attributes["keepdims"].as_int())
        rank = len(given.shape)
        places = [] if axes is None else [int(axis) % rank for axis in axes.numpy().reshape(-1)]
        if not places:
            flat = builder.add("Reshape", given, builder.hold([-1]))
            found = builder.add("GatherElements", flat, builder.add(place, flat, axis=0, keepdims=1), axis=0)
            builder.add("Reshape", found, builder.hold([1] * rank if keeps else []))
            return
        for axis in places:
            given = builder.add("GatherElements", given, builder.add(place, given, axis=axis, keepdims=1), axis=axis)
        if not keeps:
            builder.add("Squeeze", given, builder.hold(places))

    return rewrite


def _clip(builder: _Builder) -> None:
    found, low, high = (*builder.inputs, None, None)[:3]
    assert found is not None
    if low is not None:
        found = builder.choose(found, low, largest=True)
    if high is not None:
        builder.choose(found, high, largest=False)


def _relu(builder: _Builder) -> None:
    (given,) = builder.inputs
    assert given is not None
    builder.choose(given, builder.hold(0), largest=True)


def _sign(builder: _Builder) -> None:
    (given,), zero = builder.inputs, builder.hold(0)
    above, below = (builder.add("Less", *pair, to=ir.DataType.BOOL) for pair in ((zero, given), (given, zero)))
    builder.add("Sub", *(builder.add("Cast", one) for one in (above, below)))


def _source_dtype(value: ir.Value | None) -> ir.DataType | None:
    """Of what was cast to `value`; None where it is no cast."""
    producer = value.producer() if value is not None else None
    cast = producer.inputs[0] if producer is not None and producer.op_type == "Cast" else None
    return cast.dtype if cast is not None else None


_REARRANGES = frozenset({"Expand", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_FOLLOWED = 12
"""Operators between a mask and what is multiplied: a running product of a mask is one of five."""


def _is_at_most_one(value: ir.Value | None, steps: int = _FOLLOWED) -> bool:
    """Whether numbers are booleans, or constants of at most 1, that were cast, moved or chosen among: their products
    are exact."""
    constant = None if value is None else convenience.get_const_tensor(value)
    if constant is not None:
        return bool((np.abs(constant.numpy()) <= 1).all())
    producer = None if value is None else value.producer()
    if value is None or producer is None or not steps:
        return value is not None and value.dtype == ir.DataType.BOOL
    if value.dtype == ir.DataType.BOOL:
        return True
    if producer.op_type == "Cast" or producer.op_type in _REARRANGES:
        return _is_at_most_one(producer.inputs[0], steps - 1)
    parts = producer.inputs[1:] if producer.op_type == "Where" else producer.inputs
    return producer.op_type in ("Where", "Mul") and all(_is_at_most_one(one, steps - 1) for one in parts)


def _sum(builder: _Builder) -> None:
    given, *axes = builder.inputs
    if _source_dtype(given) in _NARROW:
        return
    kind, builder.kind = builder.kind, ir.DataType.INT64
    wide = given if kind == ir.DataType.INT64 else builder.add("Cast", given)
    half, attributes = builder.hold(HALF), dict(builder.node.attributes)
    upper = builder.add("Div", wide, half)
    lower = builder.add("Sub", wide, builder.add("Mul", upper, half))
    sums = [builder.add("ReduceSum", part, *axes, **attributes) for part in (upper, lower)]
    found = builder.add("Add", builder.add("Mul", sums[0], half), sums[1])
    if kind != ir.DataType.INT64:
        builder.add("Cast", found, to=kind)


def _product(builder: _Builder) -> None:
    given, *rest = builder.inputs
    if given is None or _is_at_most_one(given):
        return
    axes = convenience.get_const_tensor(rest[0]) if rest and rest[0] is not None else None
    places = [] if axes is None else [int(axis) for axis in axes.numpy().reshape(-1)]
    size = given.shape[places[0]] if given.shape is not None and len(places) == 1 else None
    if not isinstance(size, int) or not 0 < size <= MOST_FACTORS:
        raise CaptureError(
            "ONNX Runtime multiplies whole numbers along a dimension in double precision, which is wrong beyond 2**53",
            hint=f"multiply floats, or at most {MOST_FACTORS} whole numbers of a fixed dimension",
        )
    keepdims = builder.node.attributes["keepdims"].as_int() if "keepdims" in builder.node.attributes else 1
    parts = [
        builder.add("Gather", given, builder.hold([at] if keepdims else at, ir.DataType.INT64), axis=places[0])
        for at in range(size)
    ]
    found = parts[0]
    for part in parts[1:]:
        found = builder.add("Mul", found, part)


def _constant_of(value: ir.Value | None) -> np.ndarray | None:
    """The array that `value` always is: one that the model holds, or its cast to a narrow dtype."""
    producer = None if value is None else value.producer()
    if value is None or producer is None or producer.op_type != "Cast":
        found = None if value is None else convenience.get_const_tensor(value)
        return None if found is None else found.numpy()
    given = _constant_of(producer.inputs[0])
    return None if given is None or value.dtype is None else given.astype(value.dtype.numpy())


def _multiply(builder: _Builder, square: ir.Value | None, times: np.ndarray) -> None:
    """Products of equal factors, by squaring; they wrap as torch's do."""
    found: ir.Value | None = None
    for bit in range(int(times.max()).bit_length()):
        square = builder.add("Mul", square, square) if bit else square
        taken = (times >> bit) & 1 == 1
        if not taken.any():
            continue
        factor = square
        if taken.size > 1:
            chosen = builder.add("Constant", to=ir.DataType.BOOL, value=ir.tensor(taken))
            factor = builder.add("Where", chosen, square, builder.hold(1))
        found = factor if found is None else builder.add("Mul", found, factor)
    if not builder.made:
        builder.add("Identity", found)


def _power(builder: _Builder) -> None:
    base, exponent = (_constant_of(one) for one in builder.inputs)
    given, kind = builder.inputs[1], builder.kind
    if exponent is not None and (exponent.dtype.kind not in "iu" or not exponent.size or not exponent.any()):
        return
    if exponent is not None and exponent.min() >= 0:
        _multiply(builder, builder.inputs[0], exponent)
        return
    if base is not None and base.size == 1 and base.item() == 0 and given is not None:
        zero = builder.add("Equal", given, builder.hold(0, given.dtype), to=ir.DataType.BOOL)
        builder.add("Cast", zero, to=kind)
        return
    if base is None or base.size != 1 or base.item() != 2:
        raise CaptureError(
            "ONNX Runtime raises whole numbers to a power in double precision, which is wrong beyond 2**53",
            hint="raise floats, or to a power that is a number in the code",
        )
    builder.kind = ir.DataType.INT64
    wide = given if kind == ir.DataType.INT64 else builder.add("Cast", given)
    assert wide is not None
    last = builder.hold(63)
    power = builder.add("Pow", builder.hold(2), builder.choose(wide, builder.hold(62), largest=False))
    wraps = builder.add("Equal", wide, last, to=ir.DataType.BOOL)
    beyond = builder.add("Where", wraps, builder.hold(-(2**63)), builder.hold(0))
    fits = builder.add("Less", wide, last, to=ir.DataType.BOOL)
    found = builder.add("Where", fits, power, beyond)
    if kind != ir.DataType.INT64:
        builder.add("Cast", found, to=kind)


_EXTREMES = ("Max", "Min", "Clip", "Relu", "Sign", "ReduceMax", "ReduceMin")
_REWRITES: dict[str, Callable[[_Builder], None]] = {
    "Max": _extreme(largest=True),
    "Min": _extreme(largest=False),
    "Clip": _clip,
    "Relu": _relu,
    "Sign": _sign,
    "ReduceMax": _take_at("ArgMax"),
    "ReduceMin": _take_at("ArgMin"),
    "ReduceSum": _sum,
    "ReduceProd": _product,
    "Pow": _power,
}
"""Operator -> what adds others in its place; nothing where it is right as it is."""
