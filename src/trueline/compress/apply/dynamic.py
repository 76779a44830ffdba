"""Dynamic int8: weights are quantized ahead, activations at each run, by the range that they have then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

from onnxruntime.quantization import QuantType, quantize_dynamic

from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import is_large, multiply, quiet
from trueline.compress.apply.kept_steps import keep_in_products
from trueline.compress.apply.saturation import NARROW, saturates
from trueline.compress.measure.kernels import Kernels
from trueline.compress.method import CompressMethod
from trueline.errors import CaptureError, first_line

_WEIGHTS = {"u8": QuantType.QUInt8, "s8": QuantType.QInt8}
_OPERATORS = ["MatMul", "Gather", "Attention", "LSTM"]
"""Convolutions are left out: ConvInteger is slower than the float kernel on the processors that were measured."""


@final
class DynamicQuantizer:
    def list_variants(self) -> Sequence[CompressMethod]:
        return [CompressMethod("dynamic", ("u8",)), CompressMethod("dynamic", ("s8",))]

    def apply(self, method: CompressMethod, program: ParentProgram, out: Path) -> None:
        narrow = method.words[0] == "s8" and saturates(signed=False)
        program.notes[method.kind] = NARROW if narrow else ""
        try:
            with quiet():
                quantize_dynamic(
                    multiply(program), out, op_types_to_quantize=_OPERATORS, weight_type=_WEIGHTS[method.words[0]],
                    per_channel=True, reduce_range=narrow, nodes_to_exclude=list(method.exclude),
                    use_external_data_format=is_large(program.path),
                    extra_options={"MatMulConstBOnly": True},
                )  # fmt: skip
                if not narrow:
                    program.notes[method.kind] = keep_in_products(multiply(program), out)
        except Exception as error:
            raise CaptureError(f"ONNX Runtime does not quantize it: {first_line(error)}") from error

    def find_fault(self, kernels: Kernels) -> str:
        return "" if kernels.quantized else "not quantized: it has no multiplication by constant weights"
