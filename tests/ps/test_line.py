"""From servers to answers: tables leave training, are published and served, and the answers are those of the model."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trueline.checkpoint import checkpoint
from trueline.errors import JobStopped
from trueline.ps.publish import Publisher, publish
from trueline.recipe.load import load_recipe
from trueline.serve import start
from trueline.train.api import train
from trueline.train.launch import jobs
from worlds.counted import ENDLESS
from worlds.gates import StepGate
from worlds.waiting import until

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(900)]
RECIPE = Path(__file__).parent / "recipes" / "served.py"


class RestingGate(StepGate):
    """Workers rest between the first checkpoint and the first version, whose capture has the machine to itself; then
    the job is halted."""

    def __init__(self, job: Path) -> None:
        super().__init__(job)
        self.published = list[dict[str, Any]]()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        super().__call__(name, fields)
        if name == "model.published":
            self.published.append(fields)
            if len(self.published) == 1:
                threading.Thread(target=jobs.halt, args=(self.job.path,), daemon=True).start()
        with self._changed:
            self._changed.notify_all()

    def _is_open(self, step: int) -> bool:
        return "checkpoint.saved" not in self._seen or bool(self.published)


def answer_eagerly(saved: checkpoint.Checkpoint, items: Any) -> Any:
    model = load_recipe(RECIPE).model().eval()
    model.load_state_dict(saved.state["model"])
    with torch.no_grad():
        return model(torch.from_numpy(items)).numpy()


def ask(url: str, items: Any) -> Any:
    """The answers; None until there are some."""
    request = urllib.request.Request(f"{url}/predictions/served", json.dumps(items.tolist()).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return np.array(json.loads(reply.read()), np.float32)
    except urllib.error.HTTPError:
        return None


@pytest.mark.parametrize("strategy", [pytest.param("ps", marks=pytest.mark.long), "hybrid"])
def test_a_running_job_publishes_and_a_server_turns_to_each_version_of_it(tmp_path: Path, strategy: Any) -> None:
    store, job = tmp_path / "store", tmp_path / "job"
    with RestingGate(job) as gate, pytest.raises(JobStopped):
        train(
            RECIPE, job_dir=job, strategy=strategy, workers=1, servers=2, epochs=ENDLESS, checkpoint_every=10**6,
            publish_every=1e-3, publish_to=str(store),
        )  # fmt: skip
    assert Path(gate.published[0]["path"]) == store / "served" / "1.bundle"
    publish(job, store)
    saved = checkpoint.latest(job / "checkpoints")
    assert Publisher(job, store).last.manifest.lineage.step == saved.step
    assert list(store.glob("served/*.delta"))
    items = np.random.default_rng(0).integers(-60, 60, (7, 3))  # ids without a row too
    expected = answer_eagerly(saved, items)
    with start(model_store=str(store), load="all", watch=True, follow_s=0.2) as server:
        until(
            lambda: (
                (found := ask(server.url, items)) is not None
                and found.shape == expected.shape
                and np.allclose(found, expected, rtol=1e-4, atol=1e-5)
            ),
            lambda: f"the answers of step {saved.step}: {ask(server.url, items)}, expected {expected}",
        )
