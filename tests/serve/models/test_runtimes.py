"""Every proven program of a bundle can be the one that serves, and each answers its golden records first."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from torch import nn

from trueline import serve
from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.errors import BundleError, NotProven, UsageError
from trueline.serve.batching.execution_plan import BY_RECORD
from trueline.serve.models.loader import RuntimeOptions, load
from trueline.torchserve.recipe_archive import archive
from worlds import servers
from worlds.recipes import untrained

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


class EachRow(nn.Module):
    """Each record by itself, as often as a mask of its own making says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[0], 3, dtype=torch.int64)
        mask[:, 2] = 0
        rows = []
        for row, times in zip(x, mask.sum(1), strict=True):
            for _ in range(int(times)):
                row = self.linear(row).tanh()
            rows.append(row)
        return torch.stack(rows)


def sealed(out: Path, formats: Sequence[str], model: Callable[[], nn.Module] = scaled) -> Path:
    recipe = untrained(model, name="scaled", examples=lambda: torch.randn(4, 3))
    capture(recipe, None, out, formats=formats)
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed(tmp_path_factory.mktemp("runtimes") / "scaled.bundle", [one for one in PLATFORMS if is_here(one)])


def is_here(program: str) -> bool:
    """Whether its runtime is installed."""
    return program != "openvino" or importlib.util.find_spec("openvino") is not None


LONG = {"torchscript": pytest.mark.long}
"""Beside torch_export; an archive of TorchScript is served in test_serve_archive.py."""


@pytest.mark.jobs
@pytest.mark.parametrize("program", [pytest.param(one, marks=LONG.get(one, ())) for one in PLATFORMS])
def test_a_server_answers_from_the_program_that_it_is_told(path: Path, program: str) -> None:
    if not is_here(program):
        pytest.skip("openvino is not installed")
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
    loaded = load(open_bundle(sealed(tmp_path / "scripted.bundle", ["torchscript"])), RuntimeOptions(), max_batch=8)
    assert loaded.platform == "pytorch_libtorch"
    assert loaded.golden_cases >= 1
    assert loaded.plan.batch, loaded.plan.why


@pytest.mark.jobs
def test_a_program_that_is_not_in_the_bundle_and_a_device_that_is_not_here_are_said(path: Path) -> None:
    bundle = open_bundle(path)
    with pytest.raises(BundleError, match=r"no program in format 'offload' \(has: .*torchscript"):
        load(bundle, RuntimeOptions(program="offload"), max_batch=8)
    with pytest.raises(UsageError, match="'cuda:7'"):
        load(bundle, RuntimeOptions(program="torch_export", device="cuda:7"), max_batch=8)
    with pytest.raises(UsageError, match="no precision 'bf16'"):
        load(bundle, RuntimeOptions(program="onnx", precision="bf16"), max_batch=8)


def test_a_precision_in_which_golden_examples_fail_is_refused(path: Path) -> None:
    with pytest.raises(NotProven, match="fails golden record"):
        load(open_bundle(path), RuntimeOptions(program="torch_export", precision="bf16"), max_batch=8)


def test_threads_of_torch_are_left_as_they_are_unless_they_are_asked_for(path: Path) -> None:
    before = torch.get_num_threads()
    load(open_bundle(path), RuntimeOptions(program="torch_export"), max_batch=8)
    assert torch.get_num_threads() == before
    try:
        load(open_bundle(path), RuntimeOptions(program="torch_export", threads=1), max_batch=8)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.long
def test_a_model_that_loops_over_its_records_is_served_unbatched_and_says_so(tmp_path: Path) -> None:
    bundle = open_bundle(sealed(tmp_path / "looped.bundle", ["onnx", "torch_export"], lambda: EachRow().eval()))
    for format in ("onnx", "torch_export"):
        assert bundle.program(format).by_record
        plan = load(bundle, RuntimeOptions(program=format, threads=1), max_batch=64).plan
        assert (plan.batch, plan.why) == (False, BY_RECORD)
    with serve.start(bundle.path) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        told = client.get(f"/v2/models/{server.model}").json()["parameters"]
        assert told["batching"] is False
        assert "one record after the other" in told["batching_reason"]
        x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
        whole = client.post(f"/predictions/{server.model}", json=x.tolist()).json()
        apart = [client.post(f"/predictions/{server.model}", json=row.tolist()).json() for row in x]
        np.testing.assert_allclose(whole, apart, rtol=1e-6)


@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here, and AOTInductor compiles C++")
def test_machine_code_is_served_where_the_operator_allows_code_and_nowhere_else(tmp_path: Path) -> None:
    bundle = open_bundle(sealed(tmp_path / "scaled.bundle", ["onnx", "aotinductor"]))
    with pytest.raises(UsageError, match="machine code"):
        serve.start(bundle.path, program="aotinductor")
    x = np.linspace(-2, 2, 9, dtype=np.float32).reshape(3, 3)
    wanted = scaled()(torch.from_numpy(x)).detach().numpy()
    with serve.start(bundle.path, program="aotinductor", allow_code=True) as server:
        told = servers.get(f"{server.url}/v2/models/scaled").json()
        assert told["platform"] == "pytorch_aotinductor"
        answer = servers.post(f"{server.url}/predictions/scaled", json=x.tolist()).json()
        np.testing.assert_allclose(answer, wanted, rtol=1e-5, atol=1e-6)


RECIPE = """
def model(): ...
def loss(outputs, labels): ...
def optimizer(params): ...
def dataset(mode): ...
"""


@pytest.mark.long
def test_an_answer_of_a_recipes_archive_is_explained_at_torchserves_path_and_kserves(tmp_path: Path) -> None:
    pytest.importorskip("captum", reason="Captum is not installed: pip install 'trueline[explain]'")
    bundle = sealed(tmp_path / "scaled.bundle", ["onnx", "torch_export"])
    (tmp_path / "recipe.py").write_text(RECIPE)
    made = archive(bundle, tmp_path / "recipe.py", tmp_path / "scaled.mar", any_recipe=True)
    x = np.array([[0.5, -1.0, 2.0]], np.float32)
    with torch.no_grad():
        at, zero = scaled()(torch.from_numpy(x))[0], scaled()(torch.zeros(1, 3))[0]
    with serve.start(made, allow_code=True) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        for path in ("/explanations/scaled", "/v1/models/scaled:explain", "/v2/models/scaled/explain"):
            found = client.post(path, json=x.tolist(), headers={"target": "1"})
            assert found.status_code == 200, found.text
            told = found.json()
            assert told["target"] == 1
            (values,) = told["attributions"].values()
            assert np.shape(values) == (1, 3)
            assert np.sum(values) == pytest.approx(float(at[1] - zero[1]), abs=1e-2), "they add up to the difference"
        wrong = client.post("/explanations/scaled", json=x.tolist(), headers={"target": "7"})
        assert (wrong.status_code, "target 7 is outside" in wrong.json()["message"]) == (400, True)
        assert client.post("/predictions/scaled", json=x.tolist()).status_code == 200
