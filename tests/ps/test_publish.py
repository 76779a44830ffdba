"""A job's checkpoints become versions in a model store: a bundle, then deltas, each of one checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trueline import events
from trueline.bundle.delta import apply_delta, read_delta
from trueline.bundle.read import open_bundle, open_folder
from trueline.checkpoint import checkpoint
from trueline.errors import NotProven, UsageError
from trueline.ps import publish
from trueline.ps.publish import Publisher, repeat
from trueline.serve.models.deltas import DeltaApplier
from trueline.train import settings
from trueline.train.settings import JobSettings
from worlds import bundles

RECIPE = Path(__file__).parent / "recipes" / "dense.py"


class Job:
    """A job that has ended: its checkpoints are written by hand, and captured without torch."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.refuses = folder, False
        folder.mkdir()
        settings.save(JobSettings(
            name="job", recipe=str(RECIPE), recipe_digest="0", workers=1, min_workers=1, epochs=1, global_batch=1,
            seed=0,
        ), folder)  # fmt: skip
        patch.setattr(publish, "capture", self.capture)

    def save(self, step: int, ids: Any) -> None:
        rows = torch.full((len(ids), 8), float(step))
        rows[: len(ids) - 4] = 0.0
        state = {"model": {"t.ids": torch.tensor(ids), "t.rows": rows}}
        checkpoint.write(self.folder / "checkpoints", step=step, state=state, facts={})

    def capture(self, recipe: Any, place: Any, out: Path, **_: Any) -> None:
        if self.refuses:
            raise NotProven("the program disagrees")
        saved = checkpoint.read(place)
        model = {name: value.numpy() for name, value in saved.state["model"].items()}
        bundles.tabled(out, model["t.ids"], model["t.rows"], scale=saved.step, step=saved.step)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path / "job", monkeypatch)


@pytest.fixture
def told() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    with events.listening(lambda name, fields: found.append((name, fields))):
        yield found


def list_store(store: Path) -> list[str]:
    return sorted(one.relative_to(store).as_posix() for one in store.glob("*/*"))


def test_the_first_version_is_a_bundle_and_the_next_ones_are_what_has_changed(job: Job, tmp_path: Path) -> None:
    store = tmp_path / "store"
    publisher = Publisher(job.folder, store)
    assert publisher.publish() is None
    job.save(10, list(range(1000)))
    first = publisher.publish()
    assert (first.version, first.step, first.path) == (1, 10, store / "dense" / "1.bundle")
    assert publisher.publish() is None
    job.save(20, list(range(1, 1003)))
    second = publisher.publish()
    assert second.path == store / "dense" / "2.delta"
    assert read_delta(second.path).facts["ids"]["changed"] == 3
    assert second.bytes < first.bytes / 4
    DeltaApplier(store).apply_due()
    made = open_bundle(store / "dense" / "2.bundle")
    assert (made.digest, made.manifest.lineage.step) == (second.digest, 20)


def test_a_publisher_that_was_killed_goes_on_from_what_it_had_published(job: Job, tmp_path: Path) -> None:
    store = tmp_path / "store"
    job.save(10, list(range(100)))
    Publisher(job.folder, store).publish()
    kept = tmp_path / "kept"
    shutil.copytree(job.folder / publish.FOLDER, kept)
    job.save(20, list(range(101)))
    Publisher(job.folder, store).publish()
    shutil.rmtree(job.folder / publish.FOLDER)  # killed when the delta was in the store, and before it was noted
    kept.rename(job.folder / publish.FOLDER)
    publisher = Publisher(job.folder, store)
    assert publisher.publish() is None
    job.save(30, list(range(102)))
    assert publisher.publish().path == store / "dense" / "3.delta"
    first = open_folder(store / "dense" / "1.bundle")
    second = apply_delta(first, store / "dense" / "2.delta", tmp_path / "2.bundle")
    assert apply_delta(second, store / "dense" / "3.delta", tmp_path / "3.bundle").manifest.lineage.step == 30


def test_what_is_not_proven_is_not_published_and_the_next_checkpoint_is_tried(job: Job, tmp_path: Path, told) -> None:
    store, clock = tmp_path / "store", [0.0]
    publisher = Publisher(job.folder, store)

    def train() -> None:
        job.refuses = clock[0] == 600
        job.save(int(clock[0]), list(range(64)))

    def wait(seconds: float) -> bool:
        clock[0] += seconds
        return clock[0] > 2000

    assert repeat(publisher, 300.0, save=train, ended=wait, clock=lambda: clock[0]) == 5
    assert [fields["step"] for name, fields in told if name == "model.published"] == [300, 900, 1200, 1500, 1800]
    assert [fields["why"] for name, fields in told if name == "publish.failed"] == ["the program disagrees"]
    assert list_store(store) == ["dense/1.bundle", *(f"dense/{version}.delta" for version in range(2, 6))]


def test_the_end_of_a_job_brings_a_last_version(job: Job, tmp_path: Path) -> None:
    publisher, saved = Publisher(job.folder, tmp_path / "store"), []

    def wait(seconds: float) -> bool:
        job.save(7, list(range(64)))
        return True

    assert repeat(publisher, 300.0, save=lambda: saved.append(1), ended=wait, clock=lambda: 0.0) == 1
    assert not saved


def test_rows_of_the_store_are_those_of_the_checkpoint_after_any_number_of_deltas(job: Job, tmp_path: Path) -> None:
    store, random = tmp_path / "store", np.random.default_rng(0)
    publisher, applier = Publisher(job.folder, store), DeltaApplier(store)
    for step in range(1, 7):
        job.save(step, np.unique(random.integers(-500, 500, 300)).tolist())
        found = publisher.publish()
        applier.apply_due()
        assert open_bundle(store / "dense" / f"{step}.bundle").digest == found.digest


def test_a_url_is_no_model_store(job: Job) -> None:
    with pytest.raises(UsageError, match="expected a folder"):
        Publisher(job.folder, Path("s3://models"))


def test_settings_that_belong_together_are_checked_before_the_job(tmp_path: Path) -> None:
    from trueline.train.api import prepare

    with pytest.raises(UsageError, match="--publish-every and --publish-to belong together"):
        prepare(RECIPE, job_dir=tmp_path / "job", publish_every=10.0)
