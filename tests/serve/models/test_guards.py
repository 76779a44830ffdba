"""A guard of the signature stands before the program in every protocol, and is said in words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from trueline.bundle import Dim, Golden, Signature
from trueline.bundle.guards import Guard
from trueline.serve.batching.policy import Policy
from trueline.serve.models.catalog import Models
from trueline.serve.models.loader import RuntimeOptions, load
from trueline.serve.protocols.router import Routes
from trueline.torchserve.extension import TorchServe
from trueline.web.messages import Request, Response
from worlds import bundles


def pairs(out: Path) -> Any:
    """y = the sum of a row of x and of one of w, which is proven for a w twice as long as x only.

    The program itself would answer any: nothing but the guard refuses.
    """
    x, w = bundles.spec("x", "batch", "length"), bundles.spec("w", "batch", "double")
    y = bundles.spec("y", "batch")
    nodes = [
        helper.make_node("ReduceSum", ["x", "last"], ["a"], keepdims=0),
        helper.make_node("ReduceSum", ["w", "last"], ["b"], keepdims=0),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    program = bundles.graph(nodes, [x, w], [y], {"last": np.array([1])})
    guard = Guard(text="2 * length == double", rule="2 * d0 == d1", symbols=("length", "double"))
    dims = {"batch": Dim(), "length": Dim(multiple_of=2, min=2), "double": Dim(max=64, probed=True)}
    signature = Signature(inputs=(x, w), outputs=(y,), dims=dims, guards=(guard,))
    given = {"x": np.ones((3, 2), np.float32), "w": np.ones((3, 4), np.float32)}
    golden = Golden(case="3", inputs=given, outputs={"y": np.full(3, 6, np.float32)})
    return bundles.bundle(out, program, signature, [golden])


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    loop, pool, models = asyncio.new_event_loop(), ThreadPoolExecutor(1), Models()
    loaded = load(pairs(tmp_path_factory.mktemp("pairs") / "b"), RuntimeOptions(threads=1), max_batch=8)
    models.add("tiny", "1").make_ready(loaded, Policy(), pool, loop)
    routes = Routes(models, loop, extension=TorchServe())

    def asked(path: str, body: dict[str, Any]) -> Response:
        found = routes.answer(Request("POST", path.encode(), {}, json.dumps(body).encode()))
        return found if isinstance(found, Response) else loop.run_until_complete(found)

    yield asked
    pool.shutdown()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def oip(length: int, double: int) -> dict[str, Any]:
    sizes = {"x": length, "w": double}
    return {"inputs": [{"name": n, "shape": [1, s], "datatype": "FP32", "data": [1] * s} for n, s in sizes.items()]}


def named(length: int, double: int) -> dict[str, Any]:
    return {"x": [[1.0] * length], "w": [[1.0] * double]}


PROTOCOLS = [
    ("/v2/models/tiny/infer", oip),
    ("/predictions/tiny", named),
    ("/v1/models/tiny:predict", lambda length, double: {"inputs": named(length, double)}),
    ("/invocations", lambda length, double: {"inputs": named(length, double)}),
]


@pytest.mark.parametrize(("path", "body"), PROTOCOLS)
@pytest.mark.parametrize(
    ("length", "double", "words"),
    [
        (4, 7, "the sizes length = 4, double = 7 are outside the proven range, in which double is twice length"),
        (3, 6, "input 'x' has size 3 in dimension 1 (length), proven only for sizes of at least 2 and a multiple of 2"),
        (34, 68, "input 'w' has size 68 in dimension 1 (double), proven only for sizes of at least 1 and at most 64"),
    ],
)
def test_a_request_outside_a_guard_is_refused_in_its_words(
    ask: Any, path: str, body: Any, length: int, double: int, words: str
) -> None:
    refused = ask(path, body(length, double))
    assert refused.status == 400
    assert words in refused.body.decode()
    answered = ask(path, body(4, 8))
    assert answered.status == 200
    assert "12" in answered.body.decode()
