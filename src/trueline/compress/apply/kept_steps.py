"""Weights that a training for int8 has placed on steps stay there.

Methods that round weights alone choose scales of their own: asymmetric ones for unsigned weights, one for each block of
rows. Weights that are whole multiples of a scale of their channel (`find_steps`) would be rounded a second time. What a
method has written for these is replaced by the steps that they have, which are as small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from trueline.compress.apply.graph import save
from trueline.compress.apply.own_scales import find_steps, is_on_steps

KEPT_STEPS = "weights that lie on int8 steps keep them"
_MIDDLE = 128
"""Zero of unsigned weights."""
_Steps = tuple[Any, Any]
"""[in, out] Whole numbers from -127 to 127, and [out] scales."""


def keep_in_products(parent: Path, made: Path) -> str:
    """Rewrites MatMulInteger's weights in `made`, which quantize_dynamic has made of `parent`; the row's note."""
    known, model = _find_matrices(parent), onnx.load(made)
    written = {one.name: one for one in model.graph.initializer}
    kept = False
    for name, (steps, scales) in known.items():
        parts = [written[key] for part in ("quantized", "scale", "zero_point") if (key := f"{name}_{part}") in written]
        if len(parts) < 3 or list(parts[1].dims) != list(scales.shape):
            continue
        dtype = numpy_helper.to_array(parts[0]).dtype
        zero = _MIDDLE if dtype == np.uint8 else 0
        _replace(parts, (steps + zero).astype(dtype), scales, np.full(len(scales), zero, dtype))
        kept = True
    if kept:
        save(model, made)
    return KEPT_STEPS * kept


def keep_in_blocks(parent: Path, made: Any) -> str:
    """Rewrites the weights of MatMulNBits with 8 bits in the model `made`, of the program `parent`; the row's note."""
    known = _find_matrices(parent)
    written = {one.name: one for one in made.graph.initializer}
    kept = False
    for name, (steps, scales) in known.items():
        parts = [written[key] for part in ("Q8", "scales") if (key := f"{name}_{part}") in written]
        if len(parts) < 2:
            continue
        columns, blocks, size = parts[0].dims
        padded = np.full((columns, blocks * size), _MIDDLE, np.uint8)
        padded[:, : len(steps)] = (steps + _MIDDLE).T
        _replace(parts, padded.reshape(columns, blocks, size), np.repeat(scales[:, None], blocks, axis=1))
        kept = True
    return KEPT_STEPS * kept


def _find_matrices(parent: Path) -> dict[str, _Steps]:
    """The constant matrices that `parent` multiplies by and that lie on steps, by name."""
    model = onnx.load(parent)
    read = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    found = {}
    for one in model.graph.initializer:
        array = numpy_helper.to_array(one) if one.name in read and len(one.dims) == 2 else None
        if array is None or not is_on_steps(array, 1):
            continue
        scales = find_steps(array, 1)
        if scales is not None:
            found[one.name] = np.rint(array / scales).astype(np.int16), scales
    return found


def _replace(parts: list[Any], *arrays: Any) -> None:
    for part, array in zip(parts, arrays, strict=True):
        dtype = numpy_helper.to_array(part).dtype
        shaped = np.ascontiguousarray(array.astype(dtype)).reshape(part.dims)
        part.CopyFrom(numpy_helper.from_array(shaped, part.name))
