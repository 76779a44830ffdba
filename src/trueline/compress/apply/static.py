"""Static int8: weights and activations are quantized ahead, by ranges that training records have shown.

u8s8: activations unsigned, weights signed; s8s8: both signed. Which is faster depends on the processor, so a search
tries both. Weights have a scale for each channel. Convolutions and multiplications by constant weights are quantized,
and what stands between them and costs nothing more (pools, additions, reshapes; see choose.py), of a program whose
channels are of one size (equalize.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import onnx
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

from trueline.compress.apply import calibrate
from trueline.compress.apply.choose import MOVES, choose_operators, list_left
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.equalize import equalize
from trueline.compress.apply.graph import is_large, quiet, save
from trueline.compress.apply.kept_floats import keep_floats
from trueline.compress.apply.own_scales import KEPT, keeps_scales, write_with_own_scales
from trueline.compress.apply.saturation import NARROW, saturates
from trueline.compress.measure.kernels import Kernels, walk
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
        if keeps_scales(program):
            program.notes[method.kind] = KEPT
            write_with_own_scales(program, method.exclude, out)
            return
        signs, how = method.words
        cache = calibrate.ranges(program, how)
        model = onnx.load(equalize(program), load_external_data=False)
        unbounded = calibrate.find_unbounded(program)
        masking = {node.name for node in model.graph.node if unbounded.intersection((*node.input, *node.output))}
        chosen = set(choose_operators(model)) - set(method.exclude) - masking
        narrow = saturates(signed=signs == "s8s8")
        program.notes[method.kind] = NARROW if narrow else ""
        try:
            with quiet():
                quantize_static(
                    equalize(program), out, None, quant_format=QuantFormat.QDQ, per_channel=True,
                    activation_type=_ACTIVATIONS[signs], weight_type=QuantType.QInt8, reduce_range=narrow,
                    nodes_to_exclude=list_left(model, chosen), calibrate_method=CalibrationMethod.MinMax,
                    calibration_cache_path=cache, use_external_data_format=is_large(program.path),
                    extra_options={"ActivationSymmetric": signs == "s8s8", "MatMulConstBOnly": True},
                )  # fmt: skip
                _finish(out, chosen)
        except TruelineError:
            raise
        except Exception as error:
            raise CaptureError(f"ONNX Runtime does not quantize it: {first_line(error)}") from error

    def find_fault(self, kernels: Kernels) -> str:
        if kernels.quantized:
            return ""
        if not kernels.floating:
            return "not quantized: it has no convolution and no multiplication by constant weights"
        return "not quantized: the runtime computes every heavy operator in float32"


def _finish(path: Path, chosen: set[str]) -> None:
    model = onnx.load(path)
    _widen_answers(model, chosen)
    keep_floats(model)
    save(model, path)


def _widen_answers(model: Any, chosen: set[str]) -> None:
    """Takes away the rounding of products that no operator in int8 reads: their kernels add up in int32 and write
    float32 at no cost, and 256 levels for the answers of a last layer make its largest ones equal."""
    readers = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            readers[name].append(node)
    for product in [node for node in model.graph.node if node.op_type in ("Gemm", "MatMul") and node.name in chosen]:
        rounded = readers[product.output[0]]
        widened = readers[rounded[0].output[0]] if [one.op_type for one in rounded] == ["QuantizeLinear"] else []
        if [one.op_type for one in widened] != ["DequantizeLinear"]:
            continue
        answers = widened[0].output[0]
        if not any(one.name in chosen or one.op_type in MOVES for one in readers[answers]):
            product.output[0] = answers
            model.graph.node.remove(rounded[0])
            model.graph.node.remove(widened[0])
    read = {name for node in walk(model.graph) for name in node.input} | {one.name for one in model.graph.output}
    for weight in [one for one in model.graph.initializer if one.name not in read]:
        model.graph.initializer.remove(weight)
