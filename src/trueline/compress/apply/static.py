"""Static int8: weights and activations are quantized ahead, by ranges that training records have shown.

u8s8: activations unsigned, weights signed; s8s8: both signed. Which is faster depends on the processor, so a search
tries both. Weights have a scale for each channel. Convolutions and multiplications by constant weights are quantized,
and what stands between them and costs nothing more (pools, additions, reshapes).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

from trueline.compress.apply import calibrate
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import fold, is_large, quiet
from trueline.compress.measure.kernels import Kernels
from trueline.compress.method import CompressMethod
from trueline.errors import CaptureError, TruelineError, first_line

_ACTIVATIONS = {"u8s8": QuantType.QUInt8, "s8s8": QuantType.QInt8}


@final
class StaticQuantizer:
    def list_variants(self) -> Sequence[CompressMethod]:
        ways = (
            ("u8s8", "minmax"), ("u8s8", "percentile"), ("u8s8", "mse"), ("s8s8", "minmax"), ("s8s8", "percentile"),
            ("u8s8", "entropy"),  # its search takes the longest
        )  # fmt: skip
        return [CompressMethod("static", words) for words in ways]

    def apply(self, method: CompressMethod, program: ParentProgram, out: Path) -> None:
        signs, how = method.words
        cache = calibrate.ranges(program, how)
        try:
            with quiet():
                quantize_static(
                    fold(program), out, None, quant_format=QuantFormat.QDQ, per_channel=True,
                    activation_type=_ACTIVATIONS[signs], weight_type=QuantType.QInt8,
                    nodes_to_exclude=list(method.exclude), calibrate_method=CalibrationMethod.MinMax,
                    calibration_cache_path=cache, use_external_data_format=is_large(program.path),
                    extra_options={"ActivationSymmetric": signs == "s8s8", "MatMulConstBOnly": True},
                )  # fmt: skip
        except TruelineError:
            raise
        except Exception as error:
            raise CaptureError(f"ONNX Runtime does not quantize it: {first_line(error)}") from error

    def find_fault(self, kernels: Kernels) -> str:
        return "" if kernels.quantized else "not quantized: the runtime computes every heavy operator in float32"
