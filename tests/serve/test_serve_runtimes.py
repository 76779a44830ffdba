"""Every proven program of a bundle can be the one that serves, and each answers its golden examples first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import nn

from trueline import serve
from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.errors import BundleError, NotProven, UsageError
from trueline.recipe.contract import Recipe
from trueline.serve.loading import Way, load

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(r"ignore:.*torch\.jit")]

PLATFORMS = {
    "onnx": "onnxruntime_onnx",
    "openvino": "openvino_onnx",
    "torch_export": "pytorch_export",
    "torchscript": "pytorch_libtorch",
}


def scaled() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def sealed(out: Path, formats: Sequence[str]) -> Path:
    def never(*_: Any) -> Any:
        raise AssertionError("nothing is trained here")

    recipe = Recipe(
        name="scaled",
        digest="d" * 64,
        path=None,
        model=scaled,
        loss=never,
        optimizer=never,
        dataset=never,
        examples=lambda: torch.randn(4, 3),
    )
    capture(recipe, None, out, formats=formats)
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("openvino", reason="openvino is not installed")
    return sealed(tmp_path_factory.mktemp("runtimes") / "scaled.bundle", list(PLATFORMS))


@pytest.mark.parametrize("program", PLATFORMS)
def test_a_server_answers_from_the_program_that_it_is_told(path: Path, program: str) -> None:
    x = np.linspace(-2, 2, 9, dtype=np.float32).reshape(3, 3)
    wanted = scaled()(torch.from_numpy(x)).detach().numpy()
    body = {"inputs": [{"name": "x", "shape": [3, 3], "datatype": "FP32", "data": x.tolist()}]}
    with serve.start(path, program=program) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        told = client.get("/v2/models/scaled").json()
        assert told["platform"] == PLATFORMS[program]
        body["inputs"][0]["name"] = told["inputs"][0]["name"]
        answer = client.post("/v2/models/scaled/infer", json=body).json()["outputs"][0]
        np.testing.assert_allclose(np.reshape(answer["data"], answer["shape"]), wanted, rtol=1e-5, atol=1e-6)
        refused = client.post("/v2/models/scaled/infer", json={"inputs": [body["inputs"][0] | {"shape": [9, 1]}]})
        assert refused.status_code == 400, "what was proven holds whatever runs the program"


def test_a_bundle_without_an_onnx_program_is_served(tmp_path: Path) -> None:
    loaded = load(open_bundle(sealed(tmp_path / "scripted.bundle", ["torchscript"])), Way(), max_batch=8)
    assert loaded.platform == "pytorch_libtorch"
    assert loaded.golden_cases >= 1
    assert loaded.plan.batch, loaded.plan.why


def test_a_program_that_is_not_in_the_bundle_and_a_device_that_is_not_here_are_said(path: Path) -> None:
    bundle = open_bundle(path)
    with pytest.raises(BundleError, match=r"no program in format 'offload' \(has: .*torchscript"):
        load(bundle, Way(program="offload"), max_batch=8)
    with pytest.raises(UsageError, match="'cuda:7'"):
        load(bundle, Way(program="torch_export", device="cuda:7"), max_batch=8)
    with pytest.raises(UsageError, match="no precision 'bf16'"):
        load(bundle, Way(program="onnx", precision="bf16"), max_batch=8)


def test_a_precision_in_which_golden_examples_fail_is_refused(path: Path) -> None:
    with pytest.raises(NotProven, match="fails golden example"):
        load(open_bundle(path), Way(program="torch_export", precision="bf16"), max_batch=8)


def test_threads_of_torch_are_left_as_they_are_unless_they_are_asked_for(path: Path) -> None:
    before = torch.get_num_threads()
    load(open_bundle(path), Way(program="torch_export"), max_batch=8)
    assert torch.get_num_threads() == before
    try:
        load(open_bundle(path), Way(program="torch_export", threads=1), max_batch=8)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
