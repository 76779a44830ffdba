"""Rewrites of an ONNX program that quantizers need before they begin. Each keeps the answers.

fold        ONNX Runtime's own basic rewrites: batch norms folded into convolutions, constants computed
multiply    a Gemm with constant weights as MatMul and Add, which is what dynamic and weight-only methods know
"""

from __future__ import annotations

import copy
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from trueline import files
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.measure.kernels import walk
from trueline.errors import CaptureError, first_line

_LARGE = 2**30
"""Bytes of weights from which they are kept beside the graph: a protobuf ends at 2 GiB."""


def fold(program: ParentProgram) -> Path:
    """The program after ONNX Runtime's basic rewrites; made once for `program.work`. Raises CaptureError."""
    out = program.work / "folded" / "model.onnx"
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name("partial.onnx")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(partial)
        try:
            onnxruntime.InferenceSession(str(program.path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise CaptureError(f"ONNX Runtime does not open the program: {first_line(error)}") from error
        copies = _copy_weights(program.path, out.parent)
        model = onnx.load(partial)
        for written in (partial, *copies):
            written.unlink()
        _name_nodes(model)
        add_pre_process_metadata(model)
        save(model, out)
    return out


def multiply(program: ParentProgram) -> Path:
    """`fold`, with each Gemm of constant weights as a MatMul and an Add. Raises CaptureError."""
    out = program.work / "multiplied" / "model.onnx"
    if not out.is_file():
        model = onnx.load(fold(program))
        weights = {one.name: one for one in copy.deepcopy(model).graph.initializer}
        nodes = [new for node in model.graph.node for new in _split_gemm(node, weights)]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        read = {name for node in walk(model.graph) for name in node.input} | {one.name for one in model.graph.output}
        del model.graph.initializer[:]
        model.graph.initializer.extend(one for name, one in weights.items() if name in read)
        del model.graph.value_info[:]  # a transposed weight has another shape
        add_pre_process_metadata(model)
        save(model, out)
    return out


def save(model: Any, out: Path) -> None:
    """Writes `model` to `out`, with its weights beside it where they are large. The graph appears last and whole: one
    that a kill has torn would be taken for what was made once."""
    out.parent.mkdir(parents=True, exist_ok=True)
    large = sum(len(one.raw_data) for one in model.graph.initializer) > _LARGE
    with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=out.parent) as folder:
        partial = Path(folder) / out.name
        onnx.save_model(
            model, str(partial), save_as_external_data=large, location=f"{out.name}.data" if large else None
        )
        for written in sorted(partial.parent.iterdir(), key=lambda path: path == partial):
            written.replace(out.parent / written.name)


def is_large(path: Path) -> bool:
    """Whether what is made of the program has to keep its weights beside it."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")) > _LARGE


def _copy_weights(path: Path, folder: Path) -> list[Path]:
    """Copies the weights that lie beside the program: the rewritten one names them too, and onnx follows no link."""
    made = []
    for file in path.parent.glob(f"{path.name}.*"):
        made.append(folder / file.name)
        shutil.copyfile(file, made[-1])
    return made


def _name_nodes(model: Any) -> None:
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"


def _split_gemm(node: Any, weights: dict[str, Any]) -> Iterator[Any]:
    settings = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    plain = settings.get("alpha", 1.0) == 1.0 and settings.get("beta", 1.0) == 1.0 and not settings.get("transA", 0)
    if node.op_type != "Gemm" or not plain or node.input[1] not in weights:
        yield node
        return
    weight = node.input[1]
    if settings.get("transB", 0):
        turned = f"{weight}.transposed"
        if turned not in weights:
            array = np.ascontiguousarray(numpy_helper.to_array(weights[weight]).T)
            weights[turned] = numpy_helper.from_array(array, turned)
        weight = turned
    has_bias = len(node.input) > 2 and node.input[2]
    product = f"{node.output[0]}.product" if has_bias else node.output[0]
    yield helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name)
    if has_bias:
        yield helper.make_node("Add", [product, node.input[2]], [node.output[0]], name=f"{node.name}.bias")


@contextmanager
def quiet() -> Iterator[None]:
    """What quantizers print and log goes nowhere: stdout is data. A handler that they give to the root logger goes too
    (onnxruntime's matmul_nbits_quantizer calls logging.basicConfig as it is imported)."""
    logger, level = logging.getLogger(), logging.getLogger().level
    handlers = logger.handlers[:]
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
