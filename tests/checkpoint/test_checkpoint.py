"""Promises of the state codec and the checkpoint."""

import json
import os
from collections import deque

import numpy as np
import pytest
import safetensors.torch
import torch

from trueline import events, files
from trueline.checkpoint import checkpoint, manifest, tree
from trueline.checkpoint.snapshot import Snapshot
from trueline.errors import CheckpointError, OtherSchema, RecipeError, StorageError
from worlds.recipes import small, untrained


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
    path, found = manifest.find_latest(tmp_path)
    assert (path, found["step"]) == (tmp_path / "step-00000001", 1)
    assert manifest.find_latest(tmp_path / "none") is None


def test_an_unknown_schema_is_refused(tmp_path):
    path = checkpoint.write(tmp_path, step=1, state={}, facts={})
    text = json.dumps({**json.loads(json.loads((path / checkpoint.MANIFEST).read_text())["body"]), "schema": 99})
    envelope = {"digest": files.sha256_bytes(text.encode()), "body": text}
    (path / checkpoint.MANIFEST).write_text(json.dumps(envelope))
    with pytest.raises(CheckpointError, match="schema 99"):
        checkpoint.read(path)


def test_no_older_checkpoint_stands_in_for_one_that_another_version_wrote(tmp_path):
    """A torn one is passed over; a whole one of another schema is ahead of what can be read."""
    for step in (1, 2, 3):
        path = checkpoint.write(tmp_path, step=step, state={}, facts={"evaluations": []})
    (path / checkpoint.TENSORS).write_bytes(b"torn")
    assert (checkpoint.latest(tmp_path).step, manifest.find_latest(tmp_path)[1]["step"]) == (2, 2)
    file = tmp_path / "step-00000002" / checkpoint.MANIFEST
    text = json.dumps({**json.loads(json.loads(file.read_text())["body"]), "schema": 4})
    file.write_text(json.dumps({"digest": files.sha256_bytes(text.encode()), "body": text}))
    for find in (checkpoint.latest, manifest.find_latest):
        with pytest.raises(OtherSchema, match=r"step-00000002.* has schema 4, this version reads 3") as refused:
            find(tmp_path)
        assert "the version of Trueline that wrote it" in refused.value.hint


def test_a_folder_that_is_no_checkpoint_says_what_one_looks_like(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint") as caught:
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


def test_a_manifest_says_what_was_given_and_its_own_digest(tmp_path):
    path = checkpoint.write(tmp_path, step=3, state={"w": torch.ones(3)}, facts={"seed": 1, "certificates": []})
    manifest = checkpoint.read_manifest(path)
    assert (manifest["step"], manifest["seed"], manifest["certificates"]) == (3, 1, [])
    assert manifest["digest"] == checkpoint.read(path).manifest["digest"]
    assert "state" not in manifest
    assert (checkpoint.exists(path), checkpoint.exists(tmp_path / "step-00000004")) == (True, False)


def test_a_checkpoint_is_sealed_when_all_its_tensors_are_there_and_not_before(tmp_path):
    seen = []

    def sealing():
        (partial,) = tmp_path.iterdir()
        seen.append({file.name: file.stat().st_size > 4000 for file in partial.iterdir()})

    checkpoint.write(tmp_path, step=1, state={"w": torch.ones(1000)}, facts={}, sealing=sealing)
    assert seen == [{checkpoint.TENSORS: True}]


def evaluated(*bests):
    return [{"step": step, "loss": 1.0, "metrics": {}, "best": best} for step, best in bests]


def test_the_best_checkpoint_is_the_last_one_that_was_the_best_so_far_and_is_there(tmp_path):
    history = evaluated((1, True), (2, True), (3, False), (4, True))
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, step=step, state={}, facts={"evaluations": history[:step]})
    assert checkpoint.best(tmp_path).name == "step-00000002"
    checkpoint.write(tmp_path, step=5, state={}, facts={"evaluations": history})
    assert checkpoint.best(tmp_path).name == "step-00000002", "that of step 4 is not there"
    assert checkpoint.best_step(history) == 4


@pytest.mark.parametrize(
    ("keep", "best", "doomed"),
    [(1, None, [10, 20, 30]), (2, None, [10, 20]), (3, 10, []), (2, 10, [20]), (2, 30, [10, 20]), (4, None, []),
     (0, None, [10, 20, 30]), (9, None, [])],
)  # fmt: skip
def test_so_many_of_the_newest_checkpoints_stay_and_the_best_one(keep, best, doomed):
    assert checkpoint.select_removed([30, 10, 40, 20, 90], newest=40, keep=keep, best=best) == doomed


def test_pruning_removes_what_dead_writers_left_before_the_newest_and_leaves_later_writers_alone(tmp_path):
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, step=step, state={}, facts={})
    checkpoint.prune(tmp_path, newest=3, keep=1, best=1)
    assert checkpoint.steps(tmp_path) == [1, 3]


def test_a_model_from_a_checkpoint_is_in_evaluation_mode(tmp_path):
    recipe = small()
    state = {"model": dict(recipe.model().state_dict())}
    path = checkpoint.write(tmp_path, step=1, state=state, facts={})
    assert not checkpoint.load_model(recipe, path).training
    assert not checkpoint.load_model(recipe, None).training


def test_states_of_all_kinds_come_back_as_they_were():
    state = {
        "betas": (0.9, [1, (2,)], {}), 3: None, "flag": True, "name": "x", "w": torch.ones(2),
        "counts": np.arange(3, dtype=np.int32), "one": np.float64(0.5), "nothing": [], "pair": ((), []),
    }  # fmt: skip
    skeleton, tensors = tree.encode(state)
    found = tree.decode(json.loads(json.dumps(skeleton)), tensors)
    same({name: value for name, value in found.items() if name != "counts"},
         {**{name: value for name, value in state.items() if name != "counts"}, "one": 0.5})  # fmt: skip
    assert type(found["counts"]) is np.ndarray
    assert found["counts"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("index", [-1, 1, 7])
def test_a_state_that_names_a_tensor_that_is_not_there_is_refused(index):
    for kind in ("t", "n"):
        with pytest.raises(CheckpointError, match=f"names tensor {index}, but there are 1"):
            tree.decode({"l": [{kind: index}]}, [torch.ones(1)])
    with pytest.raises(CheckpointError, match="unknown kind 'x'"):
        tree.decode({"x": 0}, [])


@pytest.mark.parametrize("key", [True, 0.5, None, (1, 2)])
def test_a_key_that_json_would_change_is_refused(key):
    with pytest.raises(CheckpointError, match="expected a string or an integer"):
        tree.encode({"optimizer": {key: 1}})


def test_a_tensor_of_many_pieces_is_whole_and_each_lies_at_a_multiple_of_its_items_size(monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 16)
    tensors = [torch.arange(7, dtype=torch.uint8), torch.arange(9.0), torch.ones(1, dtype=torch.bool),
               torch.arange(11, dtype=torch.float64), torch.arange(6.0).reshape(2, 3).T, torch.empty(0)]  # fmt: skip
    data = b"".join(bytes(piece) for piece in checkpoint.tensor_pieces(tensors))
    found = safetensors.torch.load(data)
    assert all(torch.equal(found[str(number)], value) for number, value in enumerate(tensors))
    length = int.from_bytes(data[:8], "little")
    begins = {name: one["data_offsets"][0] for name, one in json.loads(data[8 : 8 + length]).items()}
    assert all((8 + length + begins[str(number)]) % value.element_size() == 0 for number, value in enumerate(tensors))


@pytest.mark.parametrize("room", [1, 7, 64, 4096])
def test_a_snapshot_is_written_with_the_bytes_and_the_digest_of_the_state_itself(tmp_path, monkeypatch, room):
    monkeypatch.setattr("trueline.storage.direct_file.BUFFER_BYTES", room)
    state = {"w": torch.arange(33.0), "e": torch.empty(0), "d": torch.arange(3.0).double(), "h": torch.ones(5).half()}
    plain = checkpoint.write(tmp_path / "plain", step=1, state=state, facts={})
    taken = checkpoint.write(tmp_path / "taken", step=1, state=Snapshot(state), facts={})
    files = [(path / checkpoint.TENSORS).read_bytes() for path in (plain, taken)]
    assert files[0] == files[1]
    same(checkpoint.read(taken).state, state)


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
    body = json.loads(json.loads((path / checkpoint.MANIFEST).read_text())["body"])
    for changed in ({}, {checkpoint.TENSORS: ""}, {checkpoint.TENSORS: "0" * 64}):
        text = json.dumps({**body, "files": changed})
        (path / checkpoint.MANIFEST).write_text(json.dumps({"digest": files.sha256_bytes(text.encode()), "body": text}))
        with pytest.raises(CheckpointError, match=checkpoint.TENSORS):
            checkpoint.read(path)


@pytest.mark.parametrize(
    ("made", "found", "hint"),
    [
        (torch.nn.Linear, "the class Linear", "return an instance: return Linear(...)"),
        (3, "an int", "return the model"),
        (None, "a NoneType", "return the model"),
    ],
)
def test_a_recipe_that_makes_no_model_is_told_what_it_made(made, found, hint):
    with pytest.raises(RecipeError) as refused:
        checkpoint.load_model(untrained(lambda: made, name="digits"), None)
    assert (refused.value.message, refused.value.hint) == (
        f"recipe 'digits': model() returned {found}, expected a torch.nn.Module",
        hint,
    )


def test_a_manifest_is_the_schema_the_time_the_step_the_facts_and_the_digests(tmp_path, monkeypatch):
    monkeypatch.setattr("trueline.clock.utc_now", lambda: "2030-01-02T03:04:05Z")
    path = checkpoint.write(tmp_path, step=3, state={"w": torch.ones(3)}, facts={"seed": 1})
    found = checkpoint.read_manifest(path)
    assert found == {
        "schema": 3,
        "created": "2030-01-02T03:04:05Z",
        "step": 3,
        "seed": 1,
        "files": {checkpoint.TENSORS: manifest.digest_file(path / checkpoint.TENSORS)},
        "digest": json.loads((path / checkpoint.MANIFEST).read_text())["digest"],
    }
    assert checkpoint.read(path).manifest == found


def test_steps_of_any_length_are_found_and_other_names_are_none(tmp_path):
    for step in (7, 123_456_789):
        checkpoint.write(tmp_path, step=step, state={}, facts={})
    for name in ("step-", "step-x", "step-1x", "notes", "steps", "-step-3"):
        (tmp_path / name).mkdir()
    assert checkpoint.steps(tmp_path) == [7, 123_456_789]
    assert manifest._steps(["step-5", "step-00000012", "step-", "xstep-3", "step-²"]) == [5, 12]


@pytest.mark.parametrize("ask", [checkpoint.latest, checkpoint.best])
def test_a_checkpoint_that_is_passed_over_is_reported_with_its_path_and_why(tmp_path, ask):
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, step=step, state={}, facts={"evaluations": evaluated((1, True))})
    for step in (2, 3):
        (tmp_path / f"step-0000000{step}" / checkpoint.MANIFEST).write_text("[]")
    heard = []
    with events.listening(lambda name, fields: heard.append((name, fields))):
        found = ask(tmp_path)
    assert getattr(found, "path", found) == tmp_path / "step-00000001"
    torn = [tmp_path / f"step-0000000{step}" for step in (3, 2)]
    why = "is torn, or not of a checkpoint: list indices must be integers or slices, not str"
    assert heard == [
        ("checkpoint.refused", {"path": str(path), "why": f"{path / checkpoint.MANIFEST} {why}"}) for path in torn
    ]


@pytest.mark.parametrize("facts", [{}, {"recipe": {}}])
def test_a_checkpoint_without_a_recipes_name_is_of_another_recipe(tmp_path, facts):
    state = {"model": dict(torch.nn.Linear(3, 3).state_dict())}
    path = checkpoint.write(tmp_path, step=1, state=state, facts=facts)
    with pytest.raises(CheckpointError, match="is of recipe 'another recipe' and does not fit") as refused:
        checkpoint.load_model(small(), path)
    assert refused.value.hint == "pass the recipe that the checkpoint was trained with"


def test_a_state_that_cannot_be_kept_is_known_without_writing_it() -> None:
    checkpoint.expect_holdable({"model": {"w": torch.zeros(2)}, "optimizer": {"state": {0: [torch.zeros(1)]}}})
    with pytest.raises(CheckpointError, match=r"tensor model.w of the state is torch.complex128"):
        checkpoint.expect_holdable({"model": {"w": torch.zeros(2, dtype=torch.complex128)}})
    with pytest.raises(CheckpointError, match="deque"):
        checkpoint.expect_holdable({"optimizer": {"h": deque([1])}})
