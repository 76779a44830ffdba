"""Does int8 saturate on this processor? Before VNNI, x86 adds each two products of 8 bits in 16 bits (`vpmaddubsw`),
which hold neither 2 x 255 x 127 nor more; weights of 7 bits always fit.

Source: ONNX Runtime's guide "Quantize ONNX models", on `reduce_range`.
"""

import functools

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

NARROW = "weights have 7 bits: at 8 this processor's int8 kernels saturate"
_DEPTH, _OPSET = 64, 17


@functools.cache
def saturates(*, signed: bool) -> bool:
    """Whether the runtime's product of the largest activations and weights of 8 bits is another one than theirs.
    `signed`: the activations."""
    most = 127 if signed else 255
    weights = np.full((_DEPTH, 16), 127, np.int8)
    zeros = np.zeros(16, np.int8)
    initial = [
        numpy_helper.from_array(np.array(1.0, np.float32), "one"),
        numpy_helper.from_array(np.array(0, np.int8 if signed else np.uint8), "zero"),
        numpy_helper.from_array(weights, "weights"),
        numpy_helper.from_array(np.ones(16, np.float32), "scales"),
        numpy_helper.from_array(zeros, "zeros"),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one", "zero"], ["steps"]),
        helper.make_node("DequantizeLinear", ["steps", "one", "zero"], ["rounded"]),
        helper.make_node("DequantizeLinear", ["weights", "scales", "zeros"], ["wide"], axis=1),
        helper.make_node("MatMul", ["rounded", "wide"], ["product"]),
    ]
    shape = [4, _DEPTH]
    graph = helper.make_graph(
        nodes, "product", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("product", TensorProto.FLOAT, [4, 16])], initial,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": np.full(shape, most, np.float32)})[0]
    return not bool((found == np.float32(most * 127 * _DEPTH)).all())
