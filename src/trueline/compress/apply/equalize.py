"""Channels of one size. An activation has one scale for all its channels: where one of them is a thousand times as
large as the others, 255 levels leave nothing for these. A batch norm behind a ReLU, which folds into no convolution,
makes such channels, or makes up for them.

Between what makes channels (a convolution, a multiplication, a batch norm) and the weights that read them there are
often only operators that keep a positive factor: ReLU, pools, padding with zeros, reshapes. There each channel is
divided by a power of two, and the weights that read it are multiplied by it. Powers of two round nothing: the answers
stay the same.

Source: Nagel et al., Data-Free Quantization Through Weight Equalization, arXiv 1906.04721, section 4.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper, numpy_helper, shape_inference

from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import fold, quiet, save
from trueline.compress.apply.own_scales import is_rounded
from trueline.compress.measure.kernels import walk
from trueline.errors import CaptureError, first_line

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
UNEQUAL = 4.0
"""The largest channel by the median one, from which on channels are made equal."""
_LEAST = 2.0**-20
"""Of the largest channel; smaller ones are raised as one of this size."""
_KEEP_FACTORS = frozenset(
    "Relu LeakyRelu MaxPool AveragePool GlobalAveragePool GlobalMaxPool Dropout Identity".split()  # noqa: SIM905 - takes one line
)


@dataclass(frozen=True, slots=True)
class ChannelSpan:
    """From the node that makes channels to the weights that read them."""

    maker: Any
    watched: str
    """The tensor whose channels are measured: what is rounded, behind a ReLU that follows at once."""
    readers: tuple[tuple[Any, Places], ...]
    """Each with the channel that every input channel of its weights reads."""


def equalize(program: ParentProgram) -> Path:
    """The folded program with channels of one size, made once for `program.work`; one whose weights were trained on
    steps keeps its own. Raises CaptureError."""
    out = program.work / "equal" / "model.onnx"
    if not out.is_file():
        if is_rounded(program):
            return fold(program)
        spans = find_spans(onnx.load(fold(program), load_external_data=False))  # protobuf takes no more than 2 GiB
        sizes = _measure([span.watched for span in spans], program)
        model = onnx.load(fold(program))
        weights = {one.name: one for one in model.graph.initializer}
        chosen = [(span, choose_factors(sizes[span.watched], span, weights)) for span in spans if span.watched in sizes]
        for span, factors in chosen:  # of the weights as they were: those between two spans are scaled twice
            if factors is not None:
                _scale(span, factors, weights)
        save(model, out)
    return out


def find_spans(model: Any) -> list[ChannelSpan]:
    """Where channels may be scaled and the answers stay."""
    graph = _Graph(model)
    found = []
    for node in model.graph.node:
        if not graph.makes_channels(node):
            continue
        walk = _Walk(graph)
        channels = graph.weights[node.input[1]].dims[_out_axis(node)]
        if walk.follow(node.output[0], 1, np.arange(channels)) and walk.ends:
            found.append(ChannelSpan(node, graph.find_watched(node), tuple(walk.ends)))
    return found


def choose_factors(sizes: Floats, span: ChannelSpan, weights: Mapping[str, Any]) -> Floats | None:
    """By what to divide each channel: powers of two; None where all are of nearly one size.

    A batch norm and a convolution of channels apart have a scale for each, so that their channels all get the size 1.
    Weights that add channels up have one scale for all, so that half of the difference (its root) stays with these.
    """
    alive = sizes > 0
    if not np.isfinite(sizes).all() or not alive.any():
        return None
    sizes = np.maximum(sizes, _LEAST * sizes.max())
    mixed = [(reader, places) for reader, places in span.readers if not _is_apart(reader, weights)]
    if mixed:
        columns = np.zeros(len(sizes))
        for reader, places in mixed:
            np.maximum.at(columns, places, _column_sizes(reader, weights))
        columns = np.maximum(columns, _LEAST * columns.max(initial=1e-30))
        sizes = np.sqrt(sizes / columns)
    sizes = np.where(alive, sizes, np.median(sizes[alive]))
    if sizes.max() < UNEQUAL * np.median(sizes) and np.median(sizes) < UNEQUAL * sizes.min():
        return None
    return np.exp2(np.round(np.log2(sizes / np.median(sizes))))


def _is_apart(reader: Any, weights: Mapping[str, Any]) -> bool:
    if reader.op_type == "Conv":
        return bool(_settings(reader).get("group", 1) > 1 and weights[reader.input[1]].dims[1] == 1)
    return bool(reader.op_type == "BatchNormalization")


def _column_sizes(reader: Any, weights: Mapping[str, Any]) -> Floats:
    """The largest weight of each input channel."""
    array = np.abs(numpy_helper.to_array(weights[reader.input[1]]).astype(np.float64))
    if reader.op_type == "Conv":
        groups = _settings(reader).get("group", 1)
        split = array.reshape(groups, -1, *array.shape[1:])
        return np.asarray(split.max(axis=(1, *range(3, split.ndim))).reshape(-1))
    return np.asarray(array.max(axis=1 - _in_axis(reader)))


class _Graph:
    """A program's nodes by what they read and write."""

    def __init__(self, model: Any) -> None:
        graph = shape_inference.infer_shapes(model).graph
        known = [*graph.value_info, *graph.output, *graph.input]
        self.shapes = {one.name: [axis.dim_value for axis in one.type.tensor_type.shape.dim] for one in known}
        self.weights = {one.name: one for one in model.graph.initializer}
        self.outputs = {one.name for one in model.graph.output}
        """And what graphs inside of operators read."""
        self.readers: dict[str, list[Any]] = defaultdict(list)
        for node in model.graph.node:
            for name in node.input:
                self.readers[name].append(node)
            for inner in (graph for one in node.attribute for graph in (one.g, *one.graphs)):
                self.outputs.update(name for inside in walk(inner) for name in inside.input)

    def owns(self, name: str) -> bool:
        """Whether it is a weight that one operator reads."""
        return name in self.weights and len(self.readers[name]) == 1 and name not in self.outputs

    def makes_channels(self, node: Any) -> bool:
        named = node.input[1:3] if node.op_type == "BatchNormalization" else node.input[1:]
        if node.op_type not in ("Conv", "Gemm", "BatchNormalization") or not all(map(self.owns, filter(None, named))):
            return False
        channels = self.weights[node.input[1]].dims[_out_axis(node)]
        whole = all(list(self.weights[name].dims) == [channels] for name in node.input[2:3] if name)
        return whole and _is_plain(node) and not any(self.readers[name] for name in node.output[1:])

    def find_watched(self, node: Any) -> str:
        readers = self.readers[node.output[0]]
        only_relu = len(readers) == 1 and readers[0].op_type == "Relu"
        return str(readers[0].output[0] if only_relu else node.output[0])


class _Walk:
    """Follows channels from their maker; `places` tells the channel of each index of the axis they lie on."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self.ends: list[tuple[Any, Places]] = []

    def follow(self, name: str, axis: int, places: Places) -> bool:
        """Collects what reads `name`; False if channels cannot be scaled there."""
        if name in self._graph.outputs:
            return False
        return all(self._pass(node, name, axis, places) for node in self._graph.readers[name])

    def _pass(self, node: Any, name: str, axis: int, places: Places) -> bool:
        if node.input[0] != name or name in node.input[1:]:
            return False
        if node.op_type in ("Conv", "Gemm", "MatMul", "BatchNormalization"):
            return self._end(node, axis, places)
        settings = _settings(node)
        if node.op_type in _KEEP_FACTORS and not any(self._graph.readers[other] for other in node.output[1:]):
            return self.follow(node.output[0], axis, places)
        if node.op_type == "Pad" and self._pads_with_zeros(node, axis, settings):
            return self.follow(node.output[0], axis, places)
        if node.op_type == "Transpose" and settings["perm"][0] == 0:
            return self.follow(node.output[0], list(settings["perm"]).index(axis), places)
        if node.op_type in ("Reshape", "Flatten", "Squeeze", "Unsqueeze"):
            return self._reshape(node, axis, places)
        return False

    def _reshape(self, node: Any, axis: int, places: Places) -> bool:
        """All axes but the first may become one; axes of size 1 may come and go behind."""
        before, after = (self._graph.shapes.get(name, []) for name in (node.input[0], node.output[0]))
        if not before or not after or 0 in before[1:] or 0 in after[1:] or before[0] != after[0]:
            return False
        if before[: axis + 1] == after[: axis + 1]:
            return self.follow(node.output[0], axis, places)
        if len(after) != 2 or before[axis] != len(places):
            return False
        spread = np.broadcast_to(places.reshape(-1, *(1,) * (len(before) - axis - 1)), before[1:])
        return self.follow(node.output[0], 1, spread.reshape(-1))

    def _pads_with_zeros(self, node: Any, axis: int, settings: Mapping[str, Any]) -> bool:
        weights = self._graph.weights
        if any(node.input[3:]) or node.input[1] not in weights:
            return False
        value = node.input[2] if len(node.input) > 2 else ""
        zero = not value or (value in weights and not numpy_helper.to_array(weights[value]).any())
        pads = numpy_helper.to_array(weights[node.input[1]])
        stays = not pads[[axis, len(pads) // 2 + axis]].any()
        return bool(stays and (zero or settings.get("mode", b"constant") in (b"reflect", b"edge")))

    def _end(self, node: Any, axis: int, places: Places) -> bool:
        graph = self._graph
        self.ends.append((node, places))
        if node.op_type == "BatchNormalization":
            return axis == 1 and graph.owns(node.input[1]) and graph.owns(node.input[3])
        if not graph.owns(node.input[1]):
            return False
        dims = list(graph.weights[node.input[1]].dims)
        if node.op_type == "Conv":
            return axis == 1 and dims[1] * _settings(node).get("group", 1) == len(places)
        rank = len(graph.shapes.get(node.input[0], [])) or 2
        plain = node.op_type == "MatMul" or _is_plain(node)
        return plain and axis == rank - 1 and len(dims) == 2 and dims[_in_axis(node)] == len(places)


def _is_plain(node: Any) -> bool:
    """Whether a Gemm is a matrix product and a sum."""
    settings = _settings(node)
    return not settings.get("transA", 0) and settings.get("alpha", 1.0) == settings.get("beta", 1.0) == 1.0


def _settings(node: Any) -> dict[str, Any]:
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def _in_axis(node: Any) -> int:
    """Of a matrix: the axis of what it reads."""
    return 1 if _settings(node).get("transB", 0) else 0


def _measure(names: Sequence[str], program: ParentProgram) -> dict[str, Floats]:
    """The largest size of each channel of these tensors in the training records, computed beside them."""
    watched = onnx.load(fold(program))
    model = onnx.load(fold(program), load_external_data=False)
    ranks = {
        one.name: len(one.type.tensor_type.shape.dim) for one in shape_inference.infer_shapes(model).graph.value_info
    }
    attribute = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx")) < 18
    outputs = {}
    for number, name in enumerate(dict.fromkeys(names)):
        axes = [axis for axis in range(ranks.get(name, 0)) if axis != 1]
        if not axes:
            continue
        sized, largest, reduced = (f"{name}.{number}.{step}" for step in ("size", "largest", "axes"))
        watched.graph.node.append(helper.make_node("Abs", [name], [sized]))
        if attribute:
            watched.graph.node.append(helper.make_node("ReduceMax", [sized], [largest], keepdims=0, axes=axes))
        else:
            watched.graph.initializer.append(numpy_helper.from_array(np.array(axes, np.int64), reduced))
            watched.graph.node.append(helper.make_node("ReduceMax", [sized, reduced], [largest], keepdims=0))
        outputs[name] = largest
    watched.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs.values())
    found: dict[str, Floats] = {}
    path = program.work / "equal" / "watched.onnx"
    try:
        with quiet():
            save(watched, path)
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            for batch in program.calibration() if outputs else ():
                for name, value in zip(outputs, session.run(list(outputs.values()), batch), strict=True):
                    size = value.astype(np.float64)
                    found[name] = np.maximum(found.get(name, size), size)
    except Exception as error:
        raise CaptureError(f"channels cannot be measured: {first_line(error)}") from error
    return found


def _scale(span: ChannelSpan, factors: Floats, weights: Mapping[str, Any]) -> None:
    """Divides the channels that a node makes, and multiplies the weights that read them."""
    weight, *bias = span.maker.input[1:3]  # of a batch norm: its factor and its shift
    _multiply(weights[weight], 1 / factors, _out_axis(span.maker))
    for name in filter(None, bias):
        _multiply(weights[name], 1 / factors, 0)
    for reader, places in span.readers:
        own = factors[places]
        if reader.op_type == "BatchNormalization":
            _multiply(weights[reader.input[1]], own, 0)
            _multiply(weights[reader.input[3]], 1 / own, 0)
        elif reader.op_type == "Conv":
            _multiply_groups(weights[reader.input[1]], own, _settings(reader).get("group", 1))
        else:
            _multiply(weights[reader.input[1]], own, _in_axis(reader))


def _out_axis(node: Any) -> int:
    """Of the weights of what makes channels."""
    return 1 - _in_axis(node) if node.op_type == "Gemm" else 0


def _multiply(weight: Any, factors: Floats, axis: int) -> None:
    array = numpy_helper.to_array(weight)
    shaped = factors.reshape(-1, *(1,) * (array.ndim - axis - 1))
    weight.CopyFrom(numpy_helper.from_array((array * shaped).astype(array.dtype), weight.name))


def _multiply_groups(weight: Any, factors: Floats, groups: int) -> None:
    array = numpy_helper.to_array(weight)
    split = array.reshape(groups, -1, *array.shape[1:])
    shaped = factors.reshape(groups, 1, -1, *(1,) * (array.ndim - 2))
    scaled = (split * shaped).astype(array.dtype).reshape(array.shape)
    weight.CopyFrom(numpy_helper.from_array(scaled, weight.name))
