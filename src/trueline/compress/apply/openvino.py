"""int8 for OpenVINO: NNCF's post-training quantization of the ONNX program, which OpenVINO then runs.

NNCF quantizes what OpenVINO has int8 kernels for, multiplications inside attention too, and corrects the biases by what
quantization has moved in their layers. ONNX Runtime does not run every such program, so its format is `openvino`.
`mixed`: activations that are not symmetric have a zero point; attention keeps its shares in float32, and SmoothQuant
moves outliers of activations into weights. `performance`: no zero points, both products of attention in int8, and no
SmoothQuant, whose multiplications stay in the program. `openvino-fp32` is the program as it is, so that the report
tells the runtime's part from int8's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import onnx

from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import fold, quiet, save
from trueline.compress.apply.key_rows import keep_rows
from trueline.compress.apply.own_scales import KEPT, keeps_scales, write_with_own_scales
from trueline.compress.measure.kernels import Kernels, walk
from trueline.compress.method import CompressMethod
from trueline.errors import CaptureError, MissingPackage, first_line

_BATCHES = 300
"""Of calibration records, at most; NNCF's own default."""
_LIGHT = frozenset(
    """
    Add AveragePool BatchNormalization Div Equal GlobalAveragePool Greater LayerNormalization Less Max Mul Pow
    Reciprocal ReduceL2 ReduceMean ReduceSum Softmax Sqrt Squeeze Sub
    """.split()  # noqa: SIM905 - as prose they take two lines
)
"""Operators that stay in float32 in a model with attention: those that NNCF leaves out of a transformer, whose second
product it leaves out too, and normalizations."""


@final
class OpenVinoQuantizer:
    def list_variants(self) -> Sequence[CompressMethod]:
        usual = CompressMethod("openvino", ("mixed",))  # without NNCF its row of the report names the extra
        return [usual, CompressMethod("openvino", ("performance",))] if _is_installed() else [usual]

    def apply(self, method: CompressMethod, program: ParentProgram, out: Path) -> None:
        nncf = _import_nncf()
        if keeps_scales(program):  # OpenVINO computes these in int8 as they are
            program.notes[method.kind] = KEPT
            write_with_own_scales(program, method.exclude, out)
            own = onnx.load(out)
            keep_rows(own)
            save(own, out)
            return
        model = onnx.load(fold(program))
        batches = list(program.calibration())[:_BATCHES]
        attends, whole = has_attention(model), method.words[0] == "performance"
        light = sorted({node.op_type for node in model.graph.node}.intersection(_LIGHT)) if attends and whole else []
        try:
            with quiet():
                found = nncf.quantize(
                    model, nncf.Dataset(batches), subset_size=len(batches),
                    preset=nncf.QuantizationPreset(method.words[0]),
                    ignored_scope=_leave_out(nncf, method.exclude, light),
                    model_type=nncf.ModelType.TRANSFORMER if attends and not whole else None,
                )  # fmt: skip
            keep_rows(found)
            save(found, out)
        except Exception as error:
            raise CaptureError(f"NNCF does not quantize it: {first_line(error)}") from error

    def find_fault(self, kernels: Kernels) -> str:
        return "" if kernels.quantized else "not quantized: OpenVINO computes every heavy operator in floating point"


@final
class OpenVinoUnchanged:
    def list_variants(self) -> Sequence[CompressMethod]:
        return [CompressMethod("openvino-fp32")] if _is_installed() else []

    def apply(self, method: CompressMethod, program: ParentProgram, out: Path) -> None:
        _import_nncf()
        save(onnx.load(fold(program)), out)

    def find_fault(self, kernels: Kernels) -> str:
        return ""


def has_attention(model: Any) -> bool:
    """Whether a softmax lies between multiplications of activations, by which NNCF treats a model as a transformer."""
    made_by = {name: node for node in walk(model.graph) for name in node.output}
    constant = {one.name for one in model.graph.initializer}
    for node in walk(model.graph):
        if node.op_type == "Attention":
            return True
        if node.op_type == "MatMul" and not constant.intersection(node.input):
            found = made_by.get(node.input[0])
            while found is not None and found.op_type in ("Dropout", "Cast", "Where", "Identity", "IsNaN"):
                found = made_by.get(found.input[-1] if found.op_type == "Where" else found.input[0])
            if found is not None and found.op_type == "Softmax":
                return True
    return False


def _leave_out(nncf: Any, names: Sequence[str], kinds: Sequence[str]) -> Any:
    return nncf.IgnoredScope(names=list(names), types=list(kinds)) if names or kinds else None


def _is_installed() -> bool:
    return find_spec("nncf") is not None and find_spec("openvino") is not None


def _import_nncf() -> Any:
    """NNCF, without its reports of usage. Raises MissingPackage."""
    os.environ.setdefault("NNCF_CI", "1")
    try:
        with quiet():
            import nncf
            import openvino  # noqa: F401 - what NNCF makes is run by it
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{error.name} is not installed, and OpenVINO's int8 is made with it",
            hint="pip install 'trueline[openvino]'",
        ) from error
    return nncf
