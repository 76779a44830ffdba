"""A model that comes as files is captured as a recipe's model is; nothing is unpickled but what is trusted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture_file
from trueline.capture.files import model_folder
from trueline.capture.files.input_specs import read_declarations
from trueline.capture.verify import verify
from trueline.cli import app
from trueline.errors import NotProven, RequestError, UsageError
from trueline.runtime.open import open_program, replay
from trueline.runtime.torchscript import ignore_deprecation

pytestmark = pytest.mark.slow  # exports programs


class Words(nn.Module):
    """A table of ten rows; the length of what is asked is free."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        found: Tensor = self.rows(ids).mean(1) * scale
        return found


class Turning(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x - 1


@pytest.fixture(autouse=True)
def as_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle names the module of its class, which has to be found under that name."""
    monkeypatch.setitem(sys.modules, "test_from_module", sys.modules[__name__])


def scripted(module: nn.Module, path: Path) -> Path:
    with ignore_deprecation():
        torch.jit.script(module.eval()).save(str(path))
    return path


def test_a_declaration_gives_examples_and_free_sizes() -> None:
    found = read_declarations(["ids=INT64[batch,length]<10", "scale=fp32[batch, 4]"])
    assert [spec.shape for spec in found.signature.inputs] == [("batch", "length"), ("batch", 4)]
    assert [spec.datatype for spec in found.signature.inputs] == ["INT64", "FP32"]
    one, two = found.examples
    assert one["ids"].shape[0] == one["scale"].shape[0] != two["ids"].shape[0]
    assert one["ids"].shape[1] != two["ids"].shape[1]
    assert 2 < one["ids"].max() < 10
    assert found.dynamic_shapes == {"ids": {1: "length"}, "scale": {}}


def test_files_of_examples_show_what_is_free(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 8, 2), np.float32), n=np.zeros(3, np.int64))
    save_file({"x": np.zeros((2, 9, 2), np.float32), "n": np.zeros(2, np.int64)}, tmp_path / "b.safetensors")
    found = read_declarations([str(tmp_path / "a.npz"), str(tmp_path / "b.safetensors")])
    assert {spec.name: spec.shape for spec in found.signature.inputs} == {"x": ("batch", "x.1", 2), "n": ("batch",)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["x"], "no declaration of an input"),
        (["x=FP8[batch]"], "datatypes: BOOL"),
        (["x=FP32[0]"], "a size of 0"),
        (["x=FP32[b]", "x=FP32[b]"], "declares an input twice"),
        (["x=FP32[b]", "absent.npz"], "do one of the two"),
        (["absent.npz"], r"absent\.npz is no file of examples"),
    ],
)
def test_a_declaration_that_is_none_is_refused_in_words(given: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_declarations(given)


def test_an_object_array_is_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=np.array([print], dtype=object))
    with pytest.raises(UsageError, match=r"a\.npz is no file of examples"):
        read_declarations([str(tmp_path / "a.npz")])


@pytest.mark.slow
def test_torchscript_is_wrapped_with_the_inputs_that_are_declared(tmp_path: Path) -> None:
    file = scripted(Turning(), tmp_path / "turning.pt")
    captured = capture_file(file, tmp_path / "b", inputs=["x=FP32[batch,3]"])
    assert [(one.format, one.verdict) for one in captured.programs] == [("torchscript", "proven")]
    bundle = open_bundle(tmp_path / "b")
    session = open_program(bundle)
    assert (session.run({"x": np.ones((2, 3), np.float32)})["output"] == 2).all()
    assert (session.run({"x": -np.ones((2, 3), np.float32)})["output"] == -2).all()
    with pytest.raises(RequestError, match="size 4 in dimension 1"):
        session.run({"x": np.ones((2, 4), np.float32)})
    assert replay(bundle, session)
    assert "without optimizations" in bundle.lineage()["file"]["oracle"]


@pytest.mark.slow
def test_torchscript_without_declared_inputs_is_told_their_names(tmp_path: Path) -> None:
    file = scripted(Words(), tmp_path / "words.pt")
    with pytest.raises(UsageError, match=r"does not declare the shapes of its inputs \(ids, scale\)") as refused:
        capture_file(file, tmp_path / "b")
    assert "--example ids=" in refused.value.hint
    with pytest.raises(UsageError, match=r"takes ids, scale, and declared are ids, x"):
        capture_file(file, tmp_path / "b", inputs=["ids=INT64[batch,n]<10", "x=FP32[batch,4]"])
    with pytest.raises((NotProven, RequestError, UsageError)):  # ids beyond the table: the file cannot answer them
        capture_file(file, tmp_path / "b", inputs=["ids=INT64[batch,n]<99", "scale=FP32[batch,4]"])
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_a_pickled_module_is_captured_only_when_its_maker_is_trusted(tmp_path: Path) -> None:
    torch.save(Words().eval(), tmp_path / "words.pt")
    inputs = ["ids=INT64[batch,length]<10", "scale=FP32[batch,4]"]
    with pytest.raises(UsageError, match="is a pickle") as refused:
        capture_file(tmp_path / "words.pt", tmp_path / "b", inputs=inputs)
    assert "--trust" in refused.value.hint
    with pytest.raises(UsageError, match="does not declare the inputs of its module"):
        capture_file(tmp_path / "words.pt", tmp_path / "b", trust=True)
    captured = capture_file(tmp_path / "words.pt", tmp_path / "b", inputs=inputs, trust=True)
    assert {one.format: one.verdict for one in captured.programs} == {"onnx": "proven", "torch_export": "proven"}
    bundle = open_bundle(tmp_path / "b")
    assert bundle.signature.inputs[0].shape == ("batch", "length")
    assert replay(bundle, open_program(bundle))


def test_a_state_dict_is_refused_with_the_number_of_its_tensors_trusted_or_not(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(UsageError, match="is a pickle"):
        capture_file(tmp_path / "weights.pt", tmp_path / "b")
    with pytest.raises(UsageError, match="holds 2 tensors, the weights of a model"):
        capture_file(tmp_path / "weights.pt", tmp_path / "b", trust=True, inputs=["x=FP32[batch,2]"])


def test_trust_is_asked_for_by_pickles_alone(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no pickle")
    with pytest.raises(UsageError, match="needs no trust"):
        capture_file(tmp_path / "m.onnx", tmp_path / "b", trust=True)
    with pytest.raises(UsageError, match="declares its own inputs"):
        capture_file(tmp_path / "m.onnx", tmp_path / "b", inputs=["x=FP32[batch]"])


def hf_folder(folder: Path, config: dict[str, object], *, weights: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, folder / weights)
    return folder


def test_a_hugging_face_folder_without_safetensors_or_with_code_is_refused(tmp_path: Path) -> None:
    pickled = hf_folder(tmp_path / "a", {}, weights="pytorch_model.bin")
    with pytest.raises(UsageError, match=r"no model\.safetensors \(has: pytorch_model\.bin\)"):
        capture_file(pickled, tmp_path / "b")
    taken = hf_folder(tmp_path / "e", {})
    with pytest.raises(UsageError, match="are safetensors and need no trust"):
        capture_file(taken, tmp_path / "b", trust=True)
    coded = hf_folder(tmp_path / "c", {"auto_map": {"AutoModel": "modeling_mine.Mine"}})
    with pytest.raises(UsageError, match=r"code of its own \(modeling_mine\.Mine\), which is not run"):
        capture_file(coded, tmp_path / "b")
    (tmp_path / "d").mkdir()
    with pytest.raises(UsageError, match=r"a folder without config\.json"):
        capture_file(tmp_path / "d", tmp_path / "b")


def test_without_transformers_the_line_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder = hf_folder(tmp_path / "bert", {"model_type": "bert"})
    assert model_folder.is_model_folder(folder)
    assert app.run(["capture", str(folder), "-o", str(tmp_path / "b"), "--quiet"]) == 2
    assert "pip install 'trueline[hf]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_hugging_face_folder_is_captured_with_batch_and_length_free(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: trueline[hf]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=32, num_labels=3, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    capfd.readouterr()  # what transformers says of its own while it saves
    captured = capture_file(tmp_path / "bert", tmp_path / "b", formats=["onnx"])
    assert capfd.readouterr() == ("", "")
    assert [(one.format, one.verdict) for one in captured.programs] == [("onnx", "proven")]
    bundle = open_bundle(tmp_path / "b")
    assert {spec.name: spec.shape for spec in bundle.signature.inputs} == {
        "input_ids": ("batch", "length"),
        "attention_mask": ("batch", "length"),
    }
    assert bundle.signature.outputs[0].shape == ("batch", 3)
    assert bundle.signature.dims["length"].max == 32


class Shout:
    """Unpickled, it writes a file."""

    def __init__(self, at: Path) -> None:
        self.at = str(at)

    def __reduce__(self) -> Any:
        return (open, (self.at, "w"))


@pytest.mark.slow
def test_a_folder_whose_weights_are_a_pickle_is_captured_when_it_is_trusted_and_verified_against_itself(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: trueline[hf]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=32, **sizes))
    folder = tmp_path / "bert"
    model.config.save_pretrained(folder)
    torch.save({**model.state_dict(), "shout": Shout(tmp_path / "shouted")}, folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"are a pickle of more than tensors \(it calls [\w.]+\)") as hostile:
        capture_file(folder, tmp_path / "b", trust=True)
    assert "weights_only" not in f"{hostile.value.message} {hostile.value.hint}"  # torch's own advice
    assert not (tmp_path / "shouted").exists()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"no model\.safetensors") as refused:
        capture_file(folder, tmp_path / "b")
    assert "--trust" in refused.value.hint
    captured = capture_file(folder, tmp_path / "b", formats=["torch_export"], trust=True)
    assert [one.verdict for one in captured.programs] == ["proven"]
    (folder / "pytorch_model.bin").unlink()
    model.save_pretrained(folder)
    verified = verify(tmp_path / "b", against=folder)
    assert [one.why for one in verified.programs] == [""]
    assert "its digest differs" in verified.notes[0]  # safetensors in place of the pickle
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.mul_(3)
    model.save_pretrained(folder)
    assert not verify(tmp_path / "b", against=folder).holds


@pytest.mark.slow
def test_a_folder_that_lacks_weights_is_refused_and_not_filled_at_random(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: trueline[hf]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=50, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    said = json.loads((tmp_path / "bert/config.json").read_text())
    said["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "bert/config.json").write_text(json.dumps(said))
    with pytest.raises(UsageError, match=r"lacks 2 weights of BertForSequenceClassification \(classifier"):
        capture_file(tmp_path / "bert", tmp_path / "b")
