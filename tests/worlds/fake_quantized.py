"""The trained model of `compressible` as training for int8 leaves it: weights on steps of their channel, and inputs of
layers that the program rounds itself, written as capture writes fake-quantized values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from torch import nn

from trueline.bundle import Bundle, Dim, Golden, Signature
from trueline.compress.derive.qat import round_weight
from worlds.bundles import bundle, graph, spec
from worlds.compressible import Compressible, images

STEPS = {"r": (0.011, 20, 0, 255), "s": (0.03, 0, -128, 127), "t": (0.05, 0, 0, 127)}
"""By the name of the rounded tensor: scale, zero, least and most step."""


def round_value(given: str, made: str, weights: dict[str, np.ndarray]) -> list[onnx.NodeProto]:
    """`given` on the steps of STEPS[made]."""
    scale, zero, least, most = STEPS[made]
    facts = {"inverse": 1 / np.float32(scale), "scale": scale, "zero": zero, "least": least, "most": most}
    weights |= {f"{made}_{name}": np.array(value, np.float32) for name, value in facts.items()}
    steps = f"{made}_moved" if zero else f"{made}_whole"
    nodes = [
        helper.make_node("Mul", [given, f"{made}_inverse"], [f"{made}_divided"], name=f"{made}_divide"),
        helper.make_node("Round", [f"{made}_divided"], [f"{made}_whole"], name=f"{made}_round"),
        helper.make_node("Greater", [steps, f"{made}_least"], [f"{made}_above"], name=f"{made}_greater"),
        helper.make_node("Where", [f"{made}_above", steps, f"{made}_least"], [f"{made}_kept"], name=f"{made}_where"),
        helper.make_node("Min", [f"{made}_kept", f"{made}_most"], [f"{made}_inside"], name=f"{made}_min"),
        helper.make_node("Mul", [f"{made}_back" if zero else f"{made}_inside", f"{made}_scale"], [made]),
    ]
    if zero:
        nodes.insert(2, helper.make_node("Add", [f"{made}_whole", f"{made}_zero"], [f"{made}_moved"]))
        nodes.insert(-1, helper.make_node("Sub", [f"{made}_inside", f"{made}_zero"], [f"{made}_back"]))
    return nodes


def make_program(module: nn.Sequential, *, rounding: bool = True) -> onnx.ModelProto:
    """`rounding=False`: the weights alone are on steps."""
    weights = {name.replace(".", "_"): value.detach() for name, value in module.state_dict().items()}
    arrays = {name: (round_weight(one) if one.ndim > 1 else one).numpy() for name, one in weights.items()}
    first, second, third = ("r", "s", "t") if rounding else ("input", "b", "e")
    nodes = [
        *(round_value("input", "r", arrays) if rounding else ()),
        helper.make_node("Conv", [first, "0_weight", "0_bias"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="first_relu"),
        *(round_value("b", "s", arrays) if rounding else ()),
        helper.make_node("Conv", [second, "2_weight", "2_bias"], ["c"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"], name="second_relu"),
        helper.make_node("MaxPool", ["d"], ["e"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        *(round_value("e", "t", arrays) if rounding else ()),
        helper.make_node("Flatten", [third], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "6_weight", "6_bias"], ["output"], name="last", transB=1),
    ]
    return graph(nodes, [spec("input", "batch", 1, 8, 8)], [spec("output", "batch", 10)], arrays)


def seal(trained: Compressible, out: Path) -> Bundle:
    import onnxruntime

    model = make_program(trained.module)
    given = images(3)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    golden = [Golden(case="3", inputs={"input": given}, outputs={"output": session.run(None, {"input": given})[0]})]
    signature = Signature(
        inputs=(spec("input", "batch", 1, 8, 8),), outputs=(spec("output", "batch", 10),), dims={"batch": Dim()}
    )
    digest = trained.bundle.manifest.lineage.recipe_digest
    return bundle(out, model, signature, golden, name="rounded", recipe_digest=digest, lineage={"recipe": {}})
