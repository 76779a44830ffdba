"""ElasticDL's recipes from training to an answer: servers and workers die, and the model is evaluated and captured."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.batch.evaluate import evaluate
from trueline.capture.api import capture
from trueline.checkpoint import checkpoint
from trueline.data.formats.recordio import encode_chunk
from trueline.recipe.load import load_recipe
from trueline.serve import start
from trueline.train.api import train
from trueline.train.step import features
from worlds import servers
from worlds.gates import StepGate

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(900)]
RECIPE = Path(__file__).parent / "recipes" / "zoo.py"
RECORDS = 640


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Label, user, and three items of each record, of which some are the padding."""
    draw = np.random.default_rng(0)
    values = draw.integers(-(2**62), 2**62, (RECORDS, 5))
    values[:, 1] %= 50
    looked_at = np.linspace(0, RECORDS - 1, features.POOL).astype(np.int64)
    values[np.setdiff1d(np.arange(RECORDS), looked_at)[50], 1] = 50  # which no record of a trial has
    values[:, 2:] = draw.integers(0, 40, (RECORDS, 3))
    values[:, 0] = (values[:, 2:] < 20).sum(axis=1) > 1
    path = tmp_path / "records.recordio"
    path.write_bytes(encode_chunk([row.tobytes() for row in values]))
    monkeypatch.setenv("ZOO_RECORDS", str(path))
    return values


@pytest.mark.parametrize("strategy", ["ps", pytest.param("hybrid", marks=pytest.mark.long)])
def test_a_recipe_of_the_zoo_as_it_stands_goes_the_whole_line_whoever_dies(tmp_path, records, strategy):
    job, bundle = tmp_path / "job", tmp_path / "zoo.bundle"
    with StepGate(job, (10, "worker-0"), (25, "server-1"), (40, "master")):
        found = train(RECIPE, job_dir=job, strategy=strategy, workers=2, servers=2)
    assert found.summary.exactly_once
    if strategy == "hybrid":  # a user that no record of the trial had
        said = "".join(path.read_text() for path in (job / "logs").glob("worker-*.log"))
        assert "loss.doubted" in said
        assert "loss.untried" not in said
    assert evaluate(RECIPE, found.checkpoint).metrics["accuracy"] > 0.8
    capture(RECIPE, found.checkpoint, bundle, formats=["onnx"])
    model = load_recipe(RECIPE).make_model().eval()
    model.load_state_dict(checkpoint.read(found.checkpoint).state["model"])
    asked = {"items": records[:9, 2:].copy(), "user": records[:9, 1].copy()}
    asked["user"][0] = 10**12  # without a row
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(ids) for name, ids in asked.items()})
    with start(bundle) as server:
        inputs = [{"name": name, "shape": list(ids.shape), "datatype": "INT64", "data": ids.flatten().tolist()}
                  for name, ids in asked.items()]  # fmt: skip
        answer = servers.post(f"{server.url}/v2/models/{server.model}/infer", json={"inputs": inputs}).json()
    np.testing.assert_allclose(answer["outputs"][0]["data"], expected.numpy(), rtol=1e-4, atol=1e-5)
