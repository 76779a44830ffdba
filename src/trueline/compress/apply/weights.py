"""Weight-only int8 and int4: large matrices are stored in blocks of few bits, and widened as they are multiplied.

ONNX Runtime's MatMulNBits; blocks of 32 with a scale each, activations in int8 inside the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import onnx

from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import multiply, quiet, save
from trueline.compress.apply.kept_steps import keep_in_blocks
from trueline.compress.measure.kernels import Kernels
from trueline.compress.method import CompressMethod
from trueline.errors import CaptureError, first_line

with quiet():
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

_BITS = {"int8": 8, "int4": 4}
_BLOCK = 32
_IN_INT8 = 4
"""Of `accuracy_level`: the kernel multiplies in int8."""


@final
class WeightQuantizer:
    def list_variants(self) -> Sequence[CompressMethod]:
        return [CompressMethod("weights", ("int8",)), CompressMethod("weights", ("int4",))]

    def apply(self, method: CompressMethod, program: ParentProgram, out: Path) -> None:
        try:
            with quiet():
                config = DefaultWeightOnlyQuantConfig(
                    block_size=_BLOCK, is_symmetric=True, accuracy_level=_IN_INT8, bits=_BITS[method.words[0]]
                )
                quantizer = MatMulNBitsQuantizer(
                    onnx.load(multiply(program)), nodes_to_exclude=list(method.exclude), algo_config=config
                )
                quantizer.process()
                model, in_8_bits = quantizer.model.model, _BITS[method.words[0]] == 8
                program.notes[method.kind] = keep_in_blocks(multiply(program), model) if in_8_bits else ""
            save(model, out)
        except Exception as error:
            raise CaptureError(f"ONNX Runtime does not quantize it: {first_line(error)}") from error

    def find_fault(self, kernels: Kernels) -> str:
        return "" if kernels.quantized else "not quantized: it has no multiplication by a large constant matrix"
