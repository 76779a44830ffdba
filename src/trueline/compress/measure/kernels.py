"""Is a program compressed at all? The runtime rewrites it when it opens it; the kernels that are left tell."""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from trueline.errors import BundleError, first_line
from trueline.runtime.openvino import open_core

QUANTIZED = frozenset(
    """
    QLinearConv QLinearMatMul QGemm MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul ConvInteger MatMulNBits
    QAttention DynamicQuantizeLSTM QMoE QEmbedLayerNormalization GatherBlockQuantized ConvIntegerToFloat
    """.split()  # noqa: SIM905 - as prose they take two lines
)
FLOATING = frozenset(
    {"Conv", "FusedConv", "MatMul", "FusedMatMul", "Gemm", "FusedGemm", "ConvTranspose", "LSTM", "GRU"}
)
_OPENVINO_HEAVY = frozenset({"Convolution", "FullyConnected", "MatMul", "Deconvolution", "RNNSeq", "RNNCell"})
_COMPILED = re.compile(
    r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cpu_"
    r"(_qlinear\w*|_qconv\w*|mkldnn__\w+|mkldnn_\w+|addmm\w*|mm\w*|bmm\w*|baddbmm\w*|convolution|_mkl_linear)\("
)
"""A call of a heavy kernel in AOTInductor's wrapper."""
NAMED = 5
HEAVY = frozenset({"Conv", "MatMul", "Gemm", "ConvTranspose", "LSTM", "GRU", "RNN", "Attention"})
"""Operators that compress is about, as a captured program has them."""
WEIGHTED = HEAVY | {
    "Gather", "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization",
    "RMSNormalization",
}  # fmt: skip
"""Operators whose constants are a model's weights."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Heavy kernels of an opened program. `half`: weights that are stored in 16 bits; `left`: names of the first
    operators in float32; `operators`: of any kind, where the runtime tells."""

    quantized: int
    floating: int
    half: int = 0
    operators: int = 0
    left: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.quantized} of {self.quantized + self.floating}"


def count_kernels(path: Path, format: str = "onnx") -> Kernels:
    """The kernels of the program at `path` once its runtime (ONNX Runtime, or OpenVINO for the format `openvino`) has
    rewritten it for this machine. Raises BundleError, UsageError where the runtime is not installed."""
    if format == "openvino":
        return _count_in_openvino(path)
    if format == "aotinductor":
        return _count_in_package(path)
    with tempfile.TemporaryDirectory() as folder:
        rewritten = Path(folder) / "model.onnx"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(rewritten)
        try:
            onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BundleError(f"ONNX Runtime does not open it: {first_line(error)}") from error
        nodes = list(walk(onnx.load(rewritten, load_external_data=False).graph))
    counts = Counter(node.op_type for node in nodes)
    left = [f"{node.op_type} {node.name}".strip() for node in nodes if node.op_type in FLOATING]
    stored = onnx.load(path, load_external_data=False).graph.initializer
    half = sum(one.data_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) for one in stored)
    return Kernels(
        quantized=sum(counts[name] for name in QUANTIZED), floating=len(left), half=half, left=tuple(left[:NAMED]),
        operators=len(nodes),
    )  # fmt: skip


def _count_in_package(path: Path) -> Kernels:
    """Calls of kernels in the C++ that AOTInductor wrote for the package."""
    with zipfile.ZipFile(path) as package:
        sources = [package.read(name).decode() for name in package.namelist() if name.endswith(".wrapper.cpp")]
    counts = Counter(found[1] for text in sources for found in _COMPILED.finditer(text))
    quantized = sum(count for name, count in counts.items() if name.startswith(("_qlinear", "_qconv")))
    left = [name for name in counts.elements() if not name.startswith(("_qlinear", "_qconv"))]
    return Kernels(quantized=quantized, floating=len(left), left=tuple(left[:NAMED]))


def _count_in_openvino(path: Path) -> Kernels:
    core = open_core()
    try:
        compiled = core.compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    except Exception as error:
        raise BundleError(f"OpenVINO does not open it: {first_line(error)}") from error
    heavy = []
    for node in compiled.get_runtime_model().get_ops():
        facts = node.get_rt_info()
        kind, precision = (
            str(facts[name].astype(str)) if name in facts else "" for name in ("layerType", "runtimePrecision")
        )
        if kind in _OPENVINO_HEAVY:
            heavy.append((precision in ("i8", "u8"), f"{kind} {node.get_friendly_name()}"))
    left = [name for quantized, name in heavy if not quantized]
    return Kernels(quantized=len(heavy) - len(left), floating=len(left), left=tuple(left[:NAMED]))


def walk(graph: Any) -> Iterator[Any]:
    """The nodes of `graph` and of the graphs inside them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from walk(attribute.g)
            for inner in attribute.graphs:
                yield from walk(inner)


def list_heavy(path: Path) -> list[str]:
    """Names of the heavy operators of a program, in its order."""
    return [node.name for node in onnx.load(path, load_external_data=False).graph.node if node.op_type in HEAVY]


def size_of(path: Path) -> int:
    """Bytes of a program with its external weights."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
