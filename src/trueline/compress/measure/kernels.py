"""Is a program compressed at all? ONNX Runtime rewrites it when it opens it; the kernels that are left tell."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from trueline.errors import BundleError, first_line

QUANTIZED = frozenset(
    """
    QLinearConv QLinearMatMul QGemm MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul ConvInteger MatMulNBits
    QAttention DynamicQuantizeLSTM QMoE QEmbedLayerNormalization GatherBlockQuantized ConvIntegerToFloat
    """.split()  # noqa: SIM905 - as prose they take two lines
)
FLOATING = frozenset(
    {"Conv", "FusedConv", "MatMul", "FusedMatMul", "Gemm", "FusedGemm", "ConvTranspose", "LSTM", "GRU"}
)
NAMED = 5
HEAVY = frozenset({"Conv", "MatMul", "Gemm", "ConvTranspose", "LSTM", "GRU", "RNN", "Attention"})
"""Operators that compress is about, as a captured program has them."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Heavy kernels of an opened program. `half`: weights that are stored in 16 bits; `left`: names of the first
    operators in float32."""

    quantized: int
    floating: int
    half: int = 0
    left: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.quantized} of {self.quantized + self.floating}"


def count_kernels(path: Path) -> Kernels:
    """The kernels of the program at `path` once ONNX Runtime has rewritten it for this machine. Raises BundleError."""
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
        quantized=sum(counts[name] for name in QUANTIZED), floating=len(left), half=half, left=tuple(left[:NAMED])
    )


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
