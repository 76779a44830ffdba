"""A compressed version is tried beside its parent: their answers to live requests are compared, and decide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import trueline
from trueline.compress import search as searching
from trueline.serve.traffic.canary import CanaryRule, Disagreement, Sample, judge
from worlds import compressible
from worlds.servers import StoreApp


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions of one model: 1 the parent, 2 its int8 form, 3 one whose last layer has its classes in another order."""
    folder = tmp_path_factory.mktemp("store")
    made = compressible.make(folder / "made")
    patch = pytest.MonkeyPatch()
    with patch.context() as brief:
        brief.setattr(searching, "QUICK_S", 0.02)
        brief.setattr(searching, "FULL_S", 0.05)
        trueline.compress(made.bundle.path, quantize=["static"], out=folder / "drawn" / "2.bundle")
    made.bundle.path.rename(folder / "drawn" / "1.bundle")
    with torch.no_grad():
        made.module[6].weight.copy_(made.module[6].weight.roll(1, 0))
    compressible.seal(made.module, folder / "drawn" / "3.bundle", made.bundle.manifest.lineage.recipe_digest)
    return folder


@pytest.fixture
def app(store: Path) -> Iterator[StoreApp]:
    with StoreApp(store) as made:
        for version in ("1", "2", "3"):
            assert made.manage("POST", f"/models?url=drawn/{version}.bundle&initial_workers=1")[0] == 200
        assert made.manage("PUT", "/models/drawn/1/set-default")[0] == 200
        yield made


def ask(app: StoreApp, times: int) -> set[int]:
    """Requests of two records each."""
    images = np.random.default_rng(7).random((times, 2, 1, 8, 8), np.float32)
    statuses = set()
    for at, one in enumerate(images):
        values = {"name": "input", "shape": [2, 1, 8, 8], "datatype": "FP32", "data": one.ravel().tolist()}
        body = json.dumps({"inputs": [values]}).encode()
        statuses.add(app.ask("POST", "/v2/models/drawn/infer", body, x_trueline_key=f"k{at}")[0])
    app.run(settled())
    app.management._traffic.tick()
    return statuses


async def settled() -> None:
    """Returns when what was put off until after the answers has been done."""


def told(app: StoreApp) -> dict:
    return app.manage("GET", "/models/drawn/traffic")[1]


def test_an_int8_version_that_decides_as_its_parent_takes_the_traffic(app: StoreApp) -> None:
    rule = "weight=30&max_disagreement=0.05&min_requests=20&promote_after=20&max_latency_ratio=1000"
    assert app.manage("PUT", f"/models/drawn/2/canary?{rule}")[0] == 200
    assert ask(app, 100) == {200}
    found = told(app)["canary"]
    assert found["verdict"] == "promote"
    assert found["compared"]["records"] >= 100
    assert found["compared"]["maxAbsError"] > 0  # int8, compared with fp32
    assert "records decided otherwise" in found["why"]
    assert app.models.default("drawn") == "2"
    assert app.models.shadows == {}


def test_a_version_that_decides_otherwise_gives_the_traffic_back_though_it_is_fast_and_fails_nowhere(
    app: StoreApp,
) -> None:
    assert app.manage("PUT", "/models/drawn/3/canary?weight=30&max_disagreement=0.05")[0] == 200
    assert ask(app, 20) == {200}
    found = told(app)
    assert found["canary"]["verdict"] == "roll back"
    assert "decides otherwise for" in found["canary"]["why"]
    assert found["default"] == "1"
    assert found["split"] == {}
    assert app.models.shadows == {}


def test_a_canary_by_hand_ends_its_comparison_and_one_beside_another_shadow_is_refused(app: StoreApp) -> None:
    assert app.manage("PUT", "/models/drawn/2/canary?max_difference=5")[0] == 200
    assert app.models.shadows["drawn"].version.version == "2"
    assert app.manage("DELETE", "/models/drawn/canary")[0] == 200
    assert app.models.shadows == {}
    app.manage("PUT", "/models/drawn/3/shadow")
    status, answer = app.manage("PUT", "/models/drawn/2/canary?max_difference=5")
    assert status == 409
    assert "version 3 of model drawn is its shadow" in json.dumps(answer)
    assert app.models.split("drawn") is None


def seen(requests: int) -> Sample:
    return Sample(answered=requests, failed=0, seconds=[requests])


@pytest.mark.parametrize(
    ("beside", "act"),
    [
        (Disagreement(), "watch"),
        (Disagreement(records=49), "watch"),
        (Disagreement(records=50), "promote"),
        (Disagreement(records=100, changed=1), "promote"),
        (Disagreement(records=100, changed=9), "roll back"),
        (Disagreement(records=3, changed=1), "roll back"),
        (Disagreement(records=50, largest=0.5), "promote"),
        (Disagreement(records=50, largest=0.51), "roll back"),
    ],
)
def test_a_canary_is_judged_by_how_it_answers_beside_the_other(beside: Disagreement, act: str) -> None:
    rule = CanaryRule(max_disagreement=0.04, max_difference=0.5, promote_after=10)
    assert judge(seen(60), seen(60), rule, beside).act == act


@pytest.mark.parametrize("change", [{"max_disagreement": 1.0}, {"max_disagreement": -0.1}, {"max_difference": -1.0}])
def test_a_bound_that_makes_no_sense_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(trueline.errors.RequestError, match="max_disagreement is a share"):
        CanaryRule(**change)
