"""Weights that come as a file are loaded whole, or not at all, and nothing but tensors is unpickled."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from trueline.checkpoint import checkpoint, weights_file
from trueline.errors import CheckpointError, RecipeError
from trueline.recipe.contract import ONLY_CALLED, Recipe
from trueline.recipe.load import load_recipe


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def recipe(model: Any = Net) -> Recipe:
    return load_recipe({"name": "net", "model": model, "examples": lambda: torch.ones(1, 3)}, needs=ONLY_CALLED)


def trained() -> Net:
    torch.manual_seed(5)
    net = Net()
    net.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]
    return net


def refused(path: Path, model: Any = Net) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load_model(recipe(model), path)
    return raised.value


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "m.bin", "m.ckpt", "m.safetensors"])
def test_a_state_dict_is_loaded_whole(name: str, tmp_path: Path) -> None:
    net = trained()
    if name.endswith("safetensors"):
        safetensors.torch.save_file(net.state_dict(), tmp_path / name)
    else:
        torch.save(net.state_dict(), tmp_path / name)
    for path in (tmp_path / name, str(tmp_path / name), (tmp_path / name).as_uri()):
        assert same(checkpoint.load_model(recipe(), path), net)
        assert checkpoint.exists(path)
        assert checkpoint.read_manifest(path)["file"] == name


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_the_dict_of_a_training_script_is_opened(key: str, tmp_path: Path) -> None:
    torch.save({"epoch": 3, key: trained().state_dict(), "optimizer": {"lr": 0.1}}, tmp_path / "m.pt")
    assert same(checkpoint.load_model(recipe(), tmp_path / "m.pt"), trained())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "net."])
def test_what_a_wrapper_puts_before_the_names_is_taken_off(prefix: str, tmp_path: Path) -> None:
    torch.save({prefix + name: value for name, value in trained().state_dict().items()}, tmp_path / "m.pt")
    assert same(checkpoint.load_model(recipe(), tmp_path / "m.pt"), trained())


def test_what_is_missing_unexpected_or_of_another_shape_is_named(tmp_path: Path) -> None:
    state = trained().state_dict()
    state["first.weigth"] = state.pop("first.weight")
    state["last.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "m.pt")
    said = refused(tmp_path / "m.pt").message
    assert "missing: first.weight [4, 3] (there is first.weigth [4, 3])" in said
    assert "not in the model: first.weigth [4, 3] (there is first.weight [4, 3])" in said
    assert "last.bias has shape [3], the model's has [2]" in said


def test_many_missing_names_are_counted(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "m.pt")
    assert "and 4 more" in refused(tmp_path / "m.pt").message


def test_a_dtype_that_loses_digits_is_refused_and_one_that_does_not_is_taken(tmp_path: Path) -> None:
    state = trained().state_dict()
    torch.save({**state, "last.bias": state["last.bias"].double()}, tmp_path / "double.pt")
    assert "last.bias is torch.float64, which the model's torch.float32" in refused(tmp_path / "double.pt").message
    torch.save({**state, "last.bias": state["last.bias"].half()}, tmp_path / "half.pt")
    loaded = checkpoint.load_model(recipe(), tmp_path / "half.pt")
    assert loaded.state_dict()["last.bias"].dtype == torch.float32


def test_a_tied_weight_may_be_there_under_one_name(tmp_path: Path) -> None:
    tied = Tied()
    safetensors.torch.save_model(tied, str(tmp_path / "m.safetensors"))
    assert same(checkpoint.load_model(recipe(Tied), tmp_path / "m.safetensors"), tied)
    torch.save({"head.weight": torch.ones(5, 3)}, tmp_path / "m.pt")
    assert torch.equal(checkpoint.load_model(recipe(Tied), tmp_path / "m.pt").embed.weight, torch.ones(5, 3))  # type: ignore[union-attr, arg-type]


def test_a_pickle_of_more_than_tensors_is_not_unpickled(tmp_path: Path) -> None:
    torch.save({"net": nn.Linear(2, 2)}, tmp_path / "m.pt")
    error = refused(tmp_path / "m.pt")
    assert "holds more than tensors, and nothing of it was unpickled" in error.message
    assert "model.state_dict()" in error.hint


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"\x80\x04K\x07."])
def test_a_torn_file_is_an_error_that_names_it(content: bytes, tmp_path: Path) -> None:
    for name in ("m.pt", "m.safetensors"):
        (tmp_path / name).write_bytes(content)
        assert name in refused(tmp_path / name).message


def test_a_dict_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    torch.save(collections.OrderedDict(epoch=3, lr=0.1), tmp_path / "m.pt")
    assert "holds a dict of epoch, lr, and no state_dict" in refused(tmp_path / "m.pt").message


def test_the_manifest_of_a_file_is_its_digest_and_name(tmp_path: Path) -> None:
    torch.save(trained().state_dict(), tmp_path / "m.pt")
    assert checkpoint.exists(tmp_path / "m.pt")
    manifest = checkpoint.read_manifest(tmp_path / "m.pt")
    assert manifest["file"] == "m.pt"
    assert len(manifest["digest"]) == 64


def test_a_recipe_that_is_only_called_needs_a_model_and_examples() -> None:
    one = recipe()
    with pytest.raises(RecipeError, match="blank 'loss' is missing; expected `loss"):
        one.loss(1, 2)
    with pytest.raises(RecipeError, match="neither 'examples' nor 'dataset' is defined"):
        load_recipe({"model": Net}, needs=ONLY_CALLED)
    with pytest.raises(RecipeError, match="blank 'model' is missing"):
        load_recipe({"examples": lambda: 1}, needs=ONLY_CALLED)
    with pytest.raises(RecipeError, match="blank 'loss' is missing"):
        load_recipe({"model": Net, "examples": lambda: 1})


def fit(found: dict[str, torch.Tensor], *layers: str, model: Any = Net) -> tuple[nn.Module, weights_file.Fit]:
    made = model()
    return made, weights_file.fit_into(made, found, where="m.pt", recipe="net", new_layers=layers)


def test_a_layer_that_is_named_as_new_keeps_its_own_values_and_the_others_are_loaded() -> None:
    state = {**trained().state_dict(), "last.weight": torch.ones(9, 4), "last.bias": torch.ones(9)}
    with pytest.raises(CheckpointError, match=r"last\.weight has shape"):
        fit(state)
    net, found = fit(state, "last")
    assert torch.equal(net.first.weight, state["first.weight"])  # type: ignore[union-attr, arg-type]
    assert net.last.weight.shape == (2, 4)  # type: ignore[union-attr]
    assert found.new == found.unused == ("last.bias", "last.weight")
    assert found.loaded == len(state) - 2


def test_a_new_layer_takes_whole_parts_of_names_and_has_to_be_somewhere() -> None:
    with pytest.raises(CheckpointError, match="there is no layer 'las'"):
        fit(trained().state_dict(), "las")


def test_layers_that_only_the_file_has_may_be_left_out() -> None:
    _, found = fit({**trained().state_dict(), "aux.weight": torch.ones(1)}, "aux")
    assert (found.new, found.unused) == ((), ("aux.weight",))


def test_a_folder_of_hugging_face_is_read_with_all_its_files(tmp_path: Path) -> None:
    state, map_ = trained().state_dict(), {}
    (tmp_path / "config.json").write_text("{}")
    for number, name in enumerate(state):
        map_[name] = f"model-{number % 2}.safetensors"
    for file in set(map_.values()):
        safetensors.torch.save_file({name: state[name] for name in state if map_[name] == file}, tmp_path / file)
    assert not checkpoint.exists(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": map_}))
    assert same(checkpoint.load_model(recipe(), tmp_path), trained())
    digest = checkpoint.read_manifest(tmp_path)["digest"]
    state["last.bias"] += 1
    safetensors.torch.save_file(
        {n: state[n] for n in state if map_[n] == map_["last.bias"]}, tmp_path / map_["last.bias"]
    )
    assert checkpoint.read_manifest(tmp_path)["digest"] != digest


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": {"x": "../secrets.safetensors"}}'])
def test_an_index_that_is_none_is_an_error_that_names_it(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refused(tmp_path).message
