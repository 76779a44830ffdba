"""A program that was trained for int8 with fake quantization rounds its activations itself, by scales that its weights
were trained with: quantized once more, by ranges that are measured now, it loses what that training has gained. Here
its own scales become QuantizeLinear and DequantizeLinear, which the runtime computes in int8.

Capture writes a fake-quantized value as the operators that torch's kernel computes (capture/patches), divided by the
scale, rounded, moved, held between the least and the most step, moved back, multiplied by the scale:

    Mul, Round, [Add], Greater, Where, Min, [Sub], Mul

Weights are constants by then, already on their steps: `find_steps` tells their scales. A program of which these alone
are rounded (Trueline's own training for int8 rounds no activations in evaluation) is quantized as any other, but for
its channels, whose sizes stay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from trueline.compress.apply.choose import MOVES
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import fold, save
from trueline.compress.apply.kept_floats import keep_floats

KEPT = "it was trained for int8: the scales that it rounds by are kept, whatever ranges are named"
Floats = npt.NDArray[np.float64]
LEVELS = 127
_MOST = 255
_NEAR = 2e-3
"""Of a step: how far from a whole number a weight on its steps may be, for the rounding of float32."""
_EVIDENCE = 32
"""Weights on steps, more than are there by accident, from which a layer was trained with them."""
_SHARE = 0.5
"""Of the layers with constant weights, from which on the program's own scales are kept."""
_LAYERS = frozenset({"Conv", "Gemm", "MatMul"})
_WITH = frozenset({"Relu", "Clip"})
"""What may stand between a layer and the rounding of what it makes, as MOVES."""


@dataclass(frozen=True, slots=True)
class RoundedValue:
    """A tensor that the program rounds: `given` becomes `made` by `nodes`, on steps of `scale` from `least` to `most`
    with zero at `zero`."""

    given: str
    made: str
    scale: float
    zero: int
    least: int
    most: int
    nodes: tuple[Any, ...]

    @property
    def moved(self) -> int:
        """What its steps are moved by to be unsigned: runtimes compute a layer in int8 if what it reads and what it
        makes have one type."""
        return 0 if self.least >= 0 else 128

    @property
    def is_narrow(self) -> bool:
        """Whether it has fewer steps than 8 bits; one step more at the end changes next to nothing."""
        return self.most + self.moved < _MOST or self.least + self.moved > 1


def keeps_scales(program: ParentProgram) -> bool:
    """Whether most layers of the program read values that it rounds itself. Raises CaptureError."""
    model = onnx.load(fold(program), load_external_data=False)
    weights = {one.name: one for one in model.graph.initializer}
    rounded = {value.made for value in find_rounded(model)}
    for node in model.graph.node:
        if node.op_type in MOVES and node.input[0] in rounded:
            rounded.update(node.output)
    layers = [node for node in model.graph.node if _is_layer(node, weights)]
    reading = [node for node in layers if node.input[0] in rounded]
    return bool(reading) and len(reading) >= _SHARE * len(layers)


def is_rounded(program: ParentProgram) -> bool:
    """Whether the weights of most layers are multiples of a scale of their channel, as a training for int8 leaves them.
    Raises CaptureError."""
    model = onnx.load(fold(program))
    weights = {one.name: one for one in model.graph.initializer}
    layers = [node for node in model.graph.node if _is_layer(node, weights)]
    known = [node for node in layers if is_on_steps(numpy_helper.to_array(weights[node.input[1]]), out_axis(node))]
    return bool(known) and len(known) >= _SHARE * len(layers)


def write_with_own_scales(program: ParentProgram, exclude: Iterable[str], out: Path) -> None:
    """The program with its own scales as QuantizeLinear and DequantizeLinear, and the weights of its layers in int8;
    layers that `exclude` names multiply in float32. Raises CaptureError."""
    model = onnx.load(fold(program))
    left = set(exclude)
    rounded = {value.made: value for value in find_rounded(model)}
    replaced = {node.output[0] for value in rounded.values() for node in value.nodes}
    made_by = {name: node for node in model.graph.node for name in node.output}
    weights = {one.name: one for one in model.graph.initializer}
    before = _find_layers_before(rounded.values(), model, weights)
    nodes: list[Any] = []
    for node in model.graph.node:
        if node.output[0] in replaced:
            nodes += _write_value(rounded[node.output[0]], model) if node.output[0] in rounded else []
            continue
        known = _is_layer(node, weights) and node.name not in left
        source = _find_source(node.input[0], rounded, made_by) if known or node.op_type in MOVES else None
        if known and source is not None:
            nodes += _write_weights(node, source, weights, model)
        after = before.get(node.output[0]) if known else source
        nodes += [node, *(_round_after(node, after) if after is not None else ())]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input} | {one.name for one in model.graph.output}
    for weight in [one for one in model.graph.initializer if one.name not in read]:
        model.graph.initializer.remove(weight)
    keep_floats(model)
    save(model, out)


def find_rounded(model: Any) -> list[RoundedValue]:
    """The tensors that the program rounds to steps of one scale."""
    readers: dict[str, list[Any]] = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            readers[name].append(node)
    constants = _read_constants(model)
    outputs = {one.name for one in model.graph.output}
    found = [
        _follow(node, readers, constants) for node in model.graph.node
        if node.op_type == "Mul" and len(readers[node.output[0]]) == 1
    ]  # fmt: skip
    return [one for one in found if one is not None and not outputs.intersection(_inside(one))]


def _inside(value: RoundedValue) -> set[str]:
    return {name for node in value.nodes for name in node.output} - {value.made}


def _follow(first: Any, readers: Mapping[str, Sequence[Any]], constants: Mapping[str, float]) -> RoundedValue | None:
    """The value that is rounded by the chain that begins with `first`."""
    nodes, name, zero = [first], first.output[0], 0.0
    given, inverse = _split(first, constants)

    def take(*kinds: str) -> Any:
        nonlocal name
        known = [node for node in readers[name] if node.op_type in kinds]
        if not known or (len(readers[name]) > 1 and kinds != ("Where",)):
            return None
        nodes.append(known[0])
        name = known[0].output[0]
        return known[0]

    if inverse is None or take("Round") is None:
        return None
    moved = take("Add")
    if moved is not None:
        zero = _split(moved, constants)[1] or 0.0
    above = [node for node in readers[name] if node.op_type == "Greater"]
    steps = name
    kept = take("Where")
    if kept is None or len(above) != 1 or len(readers[steps]) != 2 or kept.input[0] != above[0].output[0]:
        return None
    nodes.append(above[0])
    least, below = constants.get(kept.input[2]), take("Min")
    most = None if below is None else _split(below, constants)[1]
    back = take("Sub") if moved is not None else None
    last = take("Mul")
    scale = None if last is None else _split(last, constants)[1]
    if least is None or most is None or scale is None or abs(scale * inverse - 1) > 1e-5:
        return None
    moved_back = moved is None or (back is not None and constants.get(back.input[1]) == zero)
    kept_above = kept.input[1] == steps and constants.get(above[0].input[1]) == least
    in_8_bits = -128 <= least <= zero <= most <= (_MOST if least >= 0 else LEVELS)
    if not (moved_back and kept_above and in_8_bits):
        return None
    return RoundedValue(given, name, scale, int(zero), int(least), int(most), tuple(nodes))


def _split(node: Any, constants: Mapping[str, float]) -> tuple[str, float | None]:
    """Of an operator with a constant: the other input, and the constant."""
    first, second = node.input
    return (second, constants[first]) if first in constants else (first, constants.get(second))


def _read_constants(model: Any) -> dict[str, float]:
    single = [one for one in model.graph.initializer if int(np.prod(one.dims)) == 1]
    return {one.name: float(numpy_helper.to_array(one).reshape(())) for one in single}


def _find_source(name: str, rounded: Mapping[str, RoundedValue], made_by: Mapping[str, Any]) -> RoundedValue | None:
    while name not in rounded and name in made_by and made_by[name].op_type in MOVES:
        name = made_by[name].input[0]
    return rounded.get(name)


def _find_layers_before(
    values: Iterable[RoundedValue], model: Any, weights: Mapping[str, Any]
) -> dict[str, RoundedValue]:
    """Outputs of layers that only become one of `values`, by operators that the runtime does not take into the layer.
    To compute the layer in int8 it has to find the rounding at once; before these operators it is the same."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    count = Counter(name for node in model.graph.node for name in node.input)
    count.update(one.name for one in model.graph.output)
    found = {}
    for value in values:
        name, fuses = value.given, not value.is_narrow
        while count[name] == 1 and name in made_by and made_by[name].op_type in MOVES | _WITH:
            kind = made_by[name].op_type
            fuses = fuses and (kind in MOVES or (kind == "Relu" and value.zero + value.moved == 0))
            name = made_by[name].input[0]
        if count[name] == 1 and not fuses and name in made_by and _is_layer(made_by[name], weights):
            found[name] = value
    return found


def _round_after(node: Any, value: RoundedValue) -> list[Any]:
    """What `node` makes on the steps of `value`: for the runtime to compute or to hand on in int8."""
    made = node.output[0]
    node.output[0] = f"{made}.given"
    return _quantize(node.output[0], made, f"{value.made}.scale", f"{value.made}.zero")


def _is_layer(node: Any, weights: Mapping[str, Any]) -> bool:
    if node.op_type not in _LAYERS or node.input[1] not in weights:
        return False
    return node.op_type == "Conv" or len(weights[node.input[1]].dims) == 2


def _write_value(value: RoundedValue, model: Any) -> list[Any]:
    """`value` rounded by the runtime; clipped before where its steps are fewer than those of 8 bits."""
    scale, zero = f"{value.made}.scale", f"{value.made}.zero"
    _add(model, scale, np.array(value.scale, np.float32))
    _add(model, zero, np.array(value.zero + value.moved, np.uint8))
    nodes, given = [], value.given
    if value.is_narrow:
        ends = [f"{value.made}.least", f"{value.made}.most"]
        for end, step in zip(ends, (value.least, value.most), strict=True):
            _add(model, end, np.array((step - value.zero) * value.scale, np.float32))
        given = f"{value.made}.clipped"
        nodes.append(helper.make_node("Clip", [value.given, *ends], [given], name=f"{value.made}.clip"))
    return [*nodes, *_quantize(given, value.made, scale, zero)]


def _quantize(given: str, made: str, scale: str, zero: str) -> list[Any]:
    steps = f"{made}.steps"
    return [
        helper.make_node("QuantizeLinear", [given, scale, zero], [steps], name=f"{made}.quantize"),
        helper.make_node("DequantizeLinear", [steps, scale, zero], [made], name=f"{made}.widen"),
    ]


def _write_weights(node: Any, source: RoundedValue, weights: Mapping[str, Any], model: Any) -> list[Any]:
    """The layer's weights as int8, and its bias as int32 on the steps of its sums, and what widens them."""
    axis = out_axis(node)
    array = numpy_helper.to_array(weights[node.input[1]])
    scales = find_steps(array, axis)
    if scales is None:
        largest = np.abs(array.astype(np.float64)).max(axis=tuple(at for at in range(array.ndim) if at != axis))
        scales = np.where(largest > 0, largest, 1.0) / LEVELS
    shaped = scales.reshape([-1 if at == axis else 1 for at in range(array.ndim)])
    steps = np.clip(np.rint(array / shaped), -LEVELS, LEVELS).astype(np.int8)
    nodes = [_store(node, 1, steps, scales, axis, model)]
    bias = node.input[2] if len(node.input) > 2 else ""
    if bias in weights and list(weights[bias].dims) == [len(scales)]:
        sums = scales * source.scale
        limit = np.iinfo(np.int32)
        rounded = np.clip(np.rint(numpy_helper.to_array(weights[bias]) / sums), limit.min, limit.max)
        nodes.append(_store(node, 2, rounded.astype(np.int32), sums, 0, model))
    return nodes


def _store(node: Any, at: int, steps: Any, scales: Floats, axis: int, model: Any) -> Any:
    """Lets `node` read `steps` times `scales`; names are of the node, as several may share a weight."""
    name = f"{node.name}.{at}"
    _add(model, f"{name}.steps", steps)
    _add(model, f"{name}.scale", scales.astype(np.float32))
    _add(model, f"{name}.zero", np.zeros(len(scales), steps.dtype))
    node.input[at] = f"{name}.widened"
    inputs = [f"{name}.steps", f"{name}.scale", f"{name}.zero"]
    return helper.make_node("DequantizeLinear", inputs, [node.input[at]], name=f"{name}.widen", axis=axis)


def _add(model: Any, name: str, array: Any) -> None:
    model.graph.initializer.append(numpy_helper.from_array(array, name))


def out_axis(node: Any) -> int:
    """The axis of a layer's weights that has its output channels."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        return 0 if any(one.name == "transB" and one.i for one in node.attribute) else 1
    return 1


def find_steps(array: npt.NDArray[Any], axis: int) -> Floats | None:
    """The scale of each channel of weights that are whole multiples of it, up to 127; None where they are not.

    >>> find_steps(np.array([[127, -5, 64], [3, 0, 2]]) * np.array([[0.01], [0.5]]), 0).round(6).tolist()
    [0.01, 0.011905]
    """
    rows = np.abs(np.moveaxis(array.astype(np.float64), axis, 0).reshape(array.shape[axis], -1))
    largest = rows.max(axis=1, initial=0.0)
    found = np.where(largest > 0, 0.0, 1.0)
    if not np.isfinite(rows).all():
        return None
    for most in range(LEVELS, 0, -1):
        open_ = np.flatnonzero(found == 0)
        if not len(open_):
            break
        levels = rows[open_] / largest[open_, None] * most
        fits = np.abs(levels[:, :_EVIDENCE] - np.rint(levels[:, :_EVIDENCE])).max(axis=1) < _NEAR
        fits[fits] = np.abs(levels[fits] - np.rint(levels[fits])).max(axis=1) < _NEAR
        found[open_[fits]] = largest[open_[fits]] / most
    return found if found.all() else None


def is_on_steps(array: npt.NDArray[Any], axis: int) -> bool:
    """Whether weights are multiples of a scale for each channel, and too many of them for an accident."""
    channels = array.shape[axis]
    enough = array.size - 2 * channels >= _EVIDENCE and np.count_nonzero(array) >= _EVIDENCE
    return bool(enough and find_steps(array, axis) is not None)
