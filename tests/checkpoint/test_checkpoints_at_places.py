"""Promises of checkpoints that hold on a disk and in an object store alike."""

import uuid
from dataclasses import replace

import fsspec
import pytest
import torch

from trueline import events
from trueline.checkpoint import checkpoint, manifest
from trueline.errors import CheckpointError, StorageError, UsageError
from trueline.storage.location import join_location
from worlds.recipes import small


@pytest.fixture(params=["disk", "store"])
def folder(request, tmp_path):
    return tmp_path / "checkpoints" if request.param == "disk" else f"memory://{uuid.uuid4().hex}"


def write(folder, *steps, **facts):
    for step in steps:
        checkpoint.write(folder, step=step, state={"w": torch.full((9,), float(step))}, facts=facts)


def change(folder, step, file, to):
    """Has `to` make new content of a checkpoint's file, or remove it when that is None."""
    fs, root = fsspec.url_to_fs(str(folder))
    path = f"{root}/{checkpoint.folder_name(step)}/{file}"
    content = to(fs.cat_file(path))
    fs.rm_file(path)
    if content is not None:
        fs.pipe_file(path, content)


def truncated_header(data: bytes) -> bytes:
    return (1 << 40).to_bytes(8, "little") + data[8:]


DAMAGES = {
    "torn tensors": (checkpoint.TENSORS, lambda data: data[:-4]),
    "empty tensors": (checkpoint.TENSORS, lambda data: b""),
    "a changed header": (checkpoint.TENSORS, truncated_header),
    "missing tensors": (checkpoint.TENSORS, lambda data: None),
    "a torn manifest": (checkpoint.MANIFEST, lambda data: data[: len(data) // 2]),
    "an empty manifest": (checkpoint.MANIFEST, lambda data: b""),
    "a manifest of something else": (checkpoint.MANIFEST, lambda data: b"[1, 2]"),
    "a changed manifest": (checkpoint.MANIFEST, lambda data: data.replace(b"F32", b"F64").replace(b"step", b"stop", 1)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_for_the_one_before_with_a_warning(folder, damage):
    write(folder, 10, 20)
    change(folder, 20, *DAMAGES[damage])
    with pytest.raises(CheckpointError, match="step-00000020"):
        checkpoint.read(join_location(folder, "step-00000020"))
    said = []
    with events.listening(lambda name, fields: said.append((name, fields))):
        found = checkpoint.latest(folder)
    assert (found.step, found.state["w"].tolist()) == (10, [10.0] * 9)
    ((name, fields),) = said
    assert name == "checkpoint.refused"
    assert "step-00000020" in fields["path"]


def test_a_damaged_file_is_refused_even_when_its_digest_was_forged(folder, monkeypatch):
    write(folder, 10)
    change(folder, 10, checkpoint.TENSORS, truncated_header)
    monkeypatch.setattr(manifest, "digest_file", lambda file: checkpoint.read_manifest(path)["files"][file.name])
    path = join_location(folder, "step-00000010")
    with pytest.raises(CheckpointError, match=r"state\.safetensors cannot be read"):
        checkpoint.read(path)


def test_where_everything_is_damaged_there_is_no_checkpoint(folder):
    write(folder, 10, 20)
    for step in (10, 20):
        change(folder, step, checkpoint.TENSORS, lambda data: data[:-1])
    assert checkpoint.latest(folder) is None


def test_a_store_that_does_not_answer_is_not_taken_for_one_without_checkpoints(monkeypatch):
    write("memory://away", 10)

    def fail(*_, **__):
        raise TimeoutError

    for method in ("find", "get_file"):
        with monkeypatch.context() as patched:
            patched.setattr(type(fsspec.filesystem("memory")), method, fail)
            with pytest.raises(StorageError):
                checkpoint.latest("memory://away")


def test_a_checkpoint_without_its_manifest_does_not_exist_in_a_store(tmp_path):
    folder = f"memory://{uuid.uuid4().hex}"
    write(folder, 10, 20)
    change(folder, 20, checkpoint.MANIFEST, lambda data: None)
    assert checkpoint.steps(folder) == [10]
    assert not checkpoint.exists(join_location(folder, "step-00000020"))
    assert checkpoint.sweep(folder) == 1
    fs, root = fsspec.url_to_fs(folder)
    assert {path.split("/")[-2] for path in fs.find(root)} == {"step-00000010"}


def evaluations(*best):
    return [{"step": step, "loss": 1.0, "metrics": {}, "best": step in best} for step in (10, 20, 30, 40)]


def test_the_newest_and_the_best_stay_and_the_rest_goes(folder):
    write(folder, 10, 20, 30, 40, evaluations=evaluations(10, 20))
    checkpoint.prune(folder, newest=40, keep=2, best=checkpoint.best_step(evaluations(10, 20)))
    assert checkpoint.steps(folder) == [20, 30, 40]
    assert checkpoint.best(folder) == join_location(folder, "step-00000020")


def test_the_best_is_the_last_best_one_that_still_exists(folder):
    write(folder, 10, 30, 40, evaluations=evaluations(10, 20))
    assert checkpoint.best(folder) == join_location(folder, "step-00000010")


def test_a_damaged_newest_manifest_does_not_hide_the_best(folder):
    write(folder, 10, 20, evaluations=evaluations(10))
    change(folder, 20, checkpoint.MANIFEST, lambda data: data[:-9])
    assert checkpoint.best(folder) == join_location(folder, "step-00000010")


def test_without_an_evaluation_there_is_no_best(folder):
    assert checkpoint.best(folder) is None
    write(folder, 10)
    assert checkpoint.best(folder) is None


def test_damaged_checkpoints_that_a_job_went_back_behind_do_not_push_out_good_ones(folder):
    write(folder, 10, 20, 70, 80, 90)
    write(folder, 30)
    checkpoint.prune(folder, newest=30, keep=2)
    assert checkpoint.steps(folder) == [20, 30, 70, 80, 90]


def test_what_dead_writers_left_in_a_store_goes_with_a_later_checkpoint(tmp_path):
    folder = f"memory://{uuid.uuid4().hex}"
    write(folder, 10, 20, 30)
    for step in (10, 30):
        change(folder, step, checkpoint.MANIFEST, lambda data: None)
    checkpoint.prune(folder, newest=20, keep=3)
    fs, root = fsspec.url_to_fs(folder)
    assert {path.split("/")[-2] for path in fs.find(root)} == {"step-00000020", "step-00000030"}


def test_every_dtype_of_safetensors_and_every_shape_comes_back(folder):
    from trueline.checkpoint.checkpoint import _DTYPES as _NAMES

    state = {
        **{str(dtype): torch.ones(3, 2).to(dtype) for dtype in _NAMES},
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "a slice": torch.arange(10)[3:9:2],
    }
    found = checkpoint.read(checkpoint.write(folder, step=1, state=state, facts={})).state
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].contiguous().flatten().view(torch.uint8).tolist() == list(
            tensor.contiguous().flatten().view(torch.uint8).tolist()
        )


def test_a_tensor_that_safetensors_cannot_name_is_refused_before_anything_is_left(folder):
    with pytest.raises(CheckpointError, match="complex128"):
        checkpoint.write(folder, step=1, state={"w": torch.ones(2, dtype=torch.complex128)}, facts={})
    assert checkpoint.steps(folder) == []


def test_a_moving_average_is_what_is_loaded_where_there_is_one(folder):
    recipe = small()
    plain = {name: torch.zeros_like(tensor) for name, tensor in recipe.model().state_dict().items()}
    sections = {
        1: {"model": plain},
        2: {"model": plain, "ema": None},
        3: {"model": plain, "ema": {"weight": torch.ones(2, 2)}},
    }
    loaded = {}
    for step, state in sections.items():
        path = checkpoint.write(folder, step=step, state=state, facts={})
        loaded[step] = {
            name: tensor.sum().item() for name, tensor in checkpoint.load_model(recipe, path).named_parameters()
        }
    assert loaded == {1: {"weight": 0, "bias": 0}, 2: {"weight": 0, "bias": 0}, 3: {"weight": 4, "bias": 0}}


def test_a_verb_finds_the_newest_checkpoint_of_a_job_wherever_it_keeps_them(folder, tmp_path):
    from trueline.cli.options import checkpoint_path
    from trueline.train.settings import JobSettings, save

    settings = JobSettings(
        name="job",
        recipe="r.py",
        recipe_digest="",
        workers=1,
        epochs=1,
        global_batch=1,
        seed=0,
        checkpoints=str(folder),
    )
    save(settings, tmp_path)
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        checkpoint_path(str(tmp_path))
    write(folder, 10, 20)
    change(folder, 20, checkpoint.TENSORS, lambda data: data[:-1])
    assert checkpoint_path(str(tmp_path)) == join_location(folder, "step-00000010")
    assert checkpoint_path(str(join_location(folder, "step-00000010"))) == join_location(folder, "step-00000010")
    if isinstance(folder, str):
        assert checkpoint_path(folder + "/") == join_location(folder, "step-00000010")


def test_a_model_is_captured_from_a_checkpoint_wherever_it_lies(folder, tmp_path):
    from trueline.capture.subject import prepare

    recipe = replace(small(), examples=lambda: torch.ones(3, 2))
    path = checkpoint.write(
        folder, step=1, state={"model": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}, facts={}
    )
    assert prepare(recipe, path).module.bias.tolist() == [1.0, 1.0]
