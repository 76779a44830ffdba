"""The trained model of `compressible` in the design of CREPE: a batch norm behind each ReLU, whose channels are from a
thousandth to a thousand in size, and a sigmoid at the end, as capture writes it. Its decisions are those of the plain
model.

`bare=True` has no batch norms, but two additions between the convolutions that cancel each other: what they round is
lost.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper
from torch import nn

from trueline.bundle import Bundle, Dim, Golden, Signature
from worlds.bundles import bundle, graph, spec
from worlds.compressible import Compressible

SIZES = np.logspace(-3, 3, 16).astype(np.float32)


def make_program(module: nn.Sequential, *, bare: bool = False) -> onnx.ModelProto:
    weights = {name.replace(".", "_"): value.detach().numpy().copy() for name, value in module.state_dict().items()}
    between = _add_and_subtract(weights) if bare else _normalize("1", "b", "n", weights, SIZES)
    behind = [] if bare else _normalize("2", "d", "m", weights, SIZES[::-1])
    weights["one"] = np.ones(1, np.float32)
    nodes = [
        helper.make_node("Conv", ["input", "0_weight", "0_bias"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="first_relu"),
        *between,
        helper.make_node("Conv", ["n", "2_weight", "2_bias"], ["c"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"], name="second_relu"),
        *behind,
        helper.make_node("MaxPool", ["d" if bare else "m"], ["e"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["e"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "6_weight", "6_bias"], ["g"], name="last", transB=1),
        helper.make_node("Neg", ["g"], ["h"], name="less"),
        helper.make_node("Exp", ["h"], ["i"], name="power"),
        helper.make_node("Add", ["i", "one"], ["j"], name="sum"),
        helper.make_node("Div", ["one", "j"], ["output"], name="quotient"),
    ]
    return graph(nodes, [spec("input", "batch", 1, 8, 8)], [spec("output", "batch", 10)], weights)


def _normalize(
    name: str, given: str, made: str, weights: dict[str, np.ndarray], sizes: np.ndarray
) -> list[onnx.NodeProto]:
    """A batch norm that makes up for the sizes that the channels of the convolution before it get."""
    conv = {"1": "0", "2": "2"}[name]
    weights[f"{conv}_weight"] *= sizes.reshape(-1, 1, 1, 1)
    weights[f"{conv}_bias"] *= sizes
    facts = {"scale": np.ones(16), "shift": np.full(16, -0.25), "mean": -0.25 * sizes, "var": sizes**2}
    weights |= {f"{name}_{fact}": value.astype(np.float32) for fact, value in facts.items()}
    inputs = [given, *(f"{name}_{fact}" for fact in facts)]
    return [helper.make_node("BatchNormalization", inputs, [made], name=f"norm{name}", epsilon=0.0)]


def _add_and_subtract(weights: dict[str, np.ndarray]) -> list[onnx.NodeProto]:
    weights |= {"much": np.full(1, 500, np.float32), "little": np.full(1, -500, np.float32)}
    return [
        helper.make_node("Add", ["b", "much"], ["up"], name="raise"),
        helper.make_node("Add", ["up", "little"], ["n"], name="lower"),
    ]


def seal(made: Compressible, out: Path, *, bare: bool = False) -> Bundle:
    x, y = spec("input", "batch", 1, 8, 8), spec("output", "batch", 10)
    given = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        answer = made.module(given).sigmoid()
    golden = [Golden(case="3", inputs={"input": given.numpy()}, outputs={"output": answer.numpy()})]
    signature = Signature(inputs=(x,), outputs=(y,), dims={"batch": Dim()})
    digest = made.bundle.manifest.lineage.recipe_digest
    program = make_program(made.module, bare=bare)
    return bundle(
        out, program, signature, golden, name="uneven", recipe_digest=digest, lineage={"recipe": {"name": "uneven"}}
    )
