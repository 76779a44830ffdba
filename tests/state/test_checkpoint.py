"""Promises of the state codec and the checkpoint."""

import json
import os

import numpy as np
import pytest
import torch
from job_recipes import small

from trueline.errors import CheckpointError, StorageError
from trueline.state import checkpoint, tree


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    else:
        assert one == other


@pytest.mark.slow
def test_what_state_dicts_return_comes_back_as_it_was(tmp_path):
    model, optimizer = trained()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "scheduler": None}
    path = checkpoint.write(tmp_path, step=7, state=state, facts={"recipe": {"name": "x"}})
    found = checkpoint.read(path)
    same(found.state, state)
    assert (found.step, path.name) == (7, "step-00000007")


def test_bfloat16_zero_dimensional_and_numpy_values_survive(tmp_path):
    state = {
        "half": torch.ones(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "tally": np.arange(3, dtype=np.int32),
    }
    found = checkpoint.read(checkpoint.write(tmp_path, step=0, state=state, facts={})).state
    assert found["half"].dtype is torch.bfloat16
    assert found["scalar"].item() == 3.5
    assert found["tally"].tolist() == [0, 1, 2]


def test_what_only_pickle_could_hold_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"state\.optimizer\.hook is a function"):
        tree.encode({"optimizer": {"hook": same}})


@pytest.mark.parametrize("name", [checkpoint.MANIFEST, checkpoint.TENSORS])
def test_one_changed_byte_is_an_error_that_names_the_file(tmp_path, name):
    path = checkpoint.write(tmp_path, step=1, state={"model": {"w": torch.arange(9.0)}}, facts={"seed": 1})
    file = path / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=name):
        checkpoint.read(path)


def test_a_torn_file_is_passed_over_for_the_next_older_checkpoint(tmp_path):
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, step=step, state={"w": torch.ones(3) * step}, facts={})
    torn = tmp_path / "step-00000003" / checkpoint.TENSORS
    torn.write_bytes(torn.read_bytes()[:-4])
    (tmp_path / "step-00000002" / checkpoint.MANIFEST).unlink()
    assert checkpoint.latest(tmp_path).step == 1


def test_an_unknown_schema_is_refused(tmp_path):
    path = checkpoint.write(tmp_path, step=1, state={}, facts={})
    from trueline import files

    text = json.dumps({**json.loads(json.loads((path / checkpoint.MANIFEST).read_text())["body"]), "schema": 99})
    envelope = {"digest": files.sha256_bytes(text.encode()), "body": text}
    (path / checkpoint.MANIFEST).write_text(json.dumps(envelope))
    with pytest.raises(CheckpointError, match="schema 99"):
        checkpoint.read(path)


def test_a_folder_that_is_no_checkpoint_says_what_one_looks_like(tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint") as caught:
        checkpoint.read(tmp_path)
    assert "checkpoints/step-" in caught.value.hint


def test_a_full_disk_leaves_nothing_behind_and_the_older_checkpoint_untouched(tmp_path, monkeypatch):
    checkpoint.write(tmp_path, step=1, state={"w": torch.ones(3)}, facts={})

    def full(handle):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="no room left"):
        checkpoint.write(tmp_path, step=2, state={"w": torch.ones(3)}, facts={})
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.latest(tmp_path).step == 1


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    recipe = small()
    state = {"model": dict(torch.nn.Linear(3, 3).state_dict())}
    path = checkpoint.write(tmp_path, step=1, state=state, facts={"recipe": {"name": "large"}})
    with pytest.raises(CheckpointError, match="is of recipe 'large' and does not fit the model of recipe 'small'"):
        checkpoint.load_model(recipe, path)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_one_changed_bit_of_a_weight_is_an_error_that_names_the_file(tmp_path, place):
    """The weights are most of the file, and nothing but the digest knows what they were."""
    path = checkpoint.write(tmp_path, step=1, state={"model": {"w": torch.arange(5000.0)}}, facts={})
    file = path / checkpoint.TENSORS
    data = bytearray(file.read_bytes())
    data[len(data) - 20_000 + round(place * 19_999)] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=rf"{checkpoint.TENSORS} was changed or torn"):
        checkpoint.read(path)
    assert checkpoint.latest(tmp_path) is None


def test_the_tensors_of_another_checkpoint_are_refused(tmp_path):
    one, two = (
        checkpoint.write(tmp_path, step=step, state={"model": {"w": torch.ones(3) * step}}, facts={}) for step in (1, 2)
    )
    (two / checkpoint.TENSORS).write_bytes((one / checkpoint.TENSORS).read_bytes())
    with pytest.raises(CheckpointError, match=checkpoint.TENSORS):
        checkpoint.read(two)
    assert checkpoint.latest(tmp_path).step == 1


def test_a_manifest_without_a_digest_of_its_tensors_is_refused(tmp_path):
    path = checkpoint.write(tmp_path, step=1, state={"model": {"w": torch.ones(3)}}, facts={})
    from trueline import files

    body = json.loads(json.loads((path / checkpoint.MANIFEST).read_text())["body"])
    for changed in ({}, {checkpoint.TENSORS: ""}, {checkpoint.TENSORS: "0" * 64}):
        text = json.dumps({**body, "files": changed})
        (path / checkpoint.MANIFEST).write_text(json.dumps({"digest": files.sha256_bytes(text.encode()), "body": text}))
        with pytest.raises(CheckpointError, match=checkpoint.TENSORS):
            checkpoint.read(path)
