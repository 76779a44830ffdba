"""A job's model goes to other tools under its own names, and weights from elsewhere start a training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn

from trueline.checkpoint import checkpoint, model_files, weights_file
from trueline.errors import CheckpointError, UsageError
from trueline.train import settings
from trueline.train.api import prepare, prepare_resume
from trueline.train.job_dir import JobDir
from worlds.jobs import TINY


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_written_model_is_loaded_by_safetensors_itself_with_tied_tensors_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    path = model_files.write_model(tmp_path, model, model.state_dict())
    assert path == tmp_path / "model"
    assert list(safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")) == ["embed.weight"]
    assert safetensors.torch.load_model(other, tmp_path / "model" / "model.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.embed.weight)


def test_a_written_model_is_no_checkpoint_of_the_job_and_can_be_captured(tmp_path: Path) -> None:
    model = Tied()
    path = model_files.write_model(tmp_path, model, model.state_dict())
    assert checkpoint.steps(tmp_path) == []
    assert weights_file.is_weights_file(path)


def test_a_model_with_a_config_makes_a_hugging_face_folder(tmp_path: Path) -> None:
    model = Tied()
    model.config = SimpleNamespace(to_json_string=lambda use_diff: '{"hidden_size": 3}')  # type: ignore[assignment]
    model_files.write_model(tmp_path, model, model.state_dict())
    config = json.loads((tmp_path / "model" / "config.json").read_bytes())
    assert config == {"hidden_size": 3, "architectures": ["Tied"]}
    file = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert b'"__metadata__":{"format":"pt"}' in file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        "classify.weight": torch.full((2, 8), 0.25, dtype=torch.float64),
        "classify.bias": torch.full((2,), 0.5, dtype=torch.float64),
        "seen": torch.zeros(240, dtype=torch.float64),
    }


def test_a_job_keeps_a_copy_of_its_first_weights_and_says_what_they_are(tmp_path: Path) -> None:
    torch.save(weights(tmp_path), tmp_path / "w.pt")
    folder = prepare(TINY, job_dir=tmp_path / "job", weights=str(tmp_path / "w.pt"), new_layers="seen")
    job = settings.load(folder)
    digest = weights_file.describe_file(tmp_path / "w.pt")["digest"]
    assert job.started_from == {"digest": digest, "file": "w.pt", "loaded": 2, "new": ["seen"], "unused": ["seen"]}
    (tmp_path / "w.pt").unlink()
    assert set(safetensors.torch.load_file(JobDir(folder).weights)) == {"classify.weight", "classify.bias"}
    resumed = settings.load(prepare_resume(folder, weights=str(tmp_path / "w.pt")))
    assert resumed.started_from == job.started_from
    with pytest.raises(UsageError, match="weights was"):
        prepare_resume(folder, weights=str(tmp_path / "others.pt"))


def test_weights_that_do_not_fit_are_refused_before_there_is_a_job(tmp_path: Path) -> None:
    torch.save({"classify.weight": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"missing: classify.bias \[2\], seen \[240\]"):
        prepare(TINY, job_dir=tmp_path / "job", weights=str(tmp_path / "w.pt"))
    assert not (tmp_path / "job").exists()
    with pytest.raises(UsageError, match="--new-layers"):
        prepare(TINY, job_dir=tmp_path / "job", new_layers="seen")


def test_the_checkpoint_of_another_job_is_weights_too(tmp_path: Path) -> None:
    state = {"model": weights(tmp_path), "ema": {"classify.bias": torch.ones(2, dtype=torch.float64)}}
    path = checkpoint.write(tmp_path / "checkpoints", step=3, state=state, facts={})
    folder = prepare(TINY, job_dir=tmp_path / "job", weights=str(path))
    stored = safetensors.torch.load_file(JobDir(folder).weights)
    assert stored["classify.bias"].tolist() == [1, 1]
