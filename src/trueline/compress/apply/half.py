"""Weights in 16 bits: half the size on disk. ONNX Runtime widens them when it opens the program and computes in
float32, as its CPU kernels do, so nothing is faster and the memory is the parent's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import fold, save
from trueline.compress.measure.kernels import Kernels
from trueline.compress.method import CompressMethod
from trueline.errors import CaptureError

_KINDS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_WORTH = 64
"""Elements from which a weight is stored in 16 bits."""


@final
class HalfQuantizer:
    """`kind` is float16 or bfloat16."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def list_variants(self) -> Sequence[CompressMethod]:
        return [CompressMethod(self._kind)]

    def apply(self, method: CompressMethod, program: ParentProgram, out: Path) -> None:
        model = onnx.load(fold(program))
        if next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0) < 13:
            raise CaptureError(f"{self._kind} needs opset 13 or newer")
        casts = []
        for weight in model.graph.initializer:
            array = numpy_helper.to_array(weight)
            if array.dtype != np.float32 or array.size < _WORTH:
                continue
            narrow = _narrow(array, f"{weight.name}.{self._kind}", self._kind)
            casts.append(helper.make_node("Cast", [narrow.name], [weight.name], to=TensorProto.FLOAT,
                                          name=f"{weight.name}.widen"))  # fmt: skip
            weight.CopyFrom(narrow)
        nodes = [*casts, *model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        save(model, out)

    def find_fault(self, kernels: Kernels) -> str:
        return "" if kernels.half else f"no weight is stored in {self._kind}"


def _narrow(array: Any, name: str, kind: str) -> Any:
    if kind == "float16":
        largest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))  # infinity, of a mask, it does hold
        if largest > np.finfo(np.float16).max:
            raise CaptureError(f"a weight has the value {largest:.3g}, which float16 does not hold")
        return numpy_helper.from_array(array.astype(np.float16), name)
    bits = array.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
    made = TensorProto(name=name, data_type=TensorProto.BFLOAT16, dims=array.shape)
    made.raw_data = rounded.tobytes()
    return made
