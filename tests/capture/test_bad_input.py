"""What is wrong with a model, an example, a bundle or a disk is one clear error, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.bundle.describe import describe
from trueline.capture.api import capture
from trueline.capture.onnx import emit
from trueline.errors import BundleError, CaptureError, NotProven, RecipeError, StorageError, TruelineError
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program, open_session
from worlds import marks, recipes
from worlds.cases import few
from worlds.models import Mlp

pytestmark = pytest.mark.slow  # captures models


class TurnsItself(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        self.train()
        return super().forward(x)


class Elsewhere(Mlp):
    """Makes a tensor on a device that is not there."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(4, device="cuda:7")


class Nan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x - x.max() - 1)


def recipe(model: Callable[[], nn.Module], examples: Callable[[], Any] = lambda: torch.randn(4, 8)) -> Recipe:
    return recipes.untrained(model, name="digits", examples=examples)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Where the bundle would be; whatever the test does, nothing else is left beside it."""
    yield tmp_path / "b"
    assert [path.name for path in tmp_path.iterdir()] in ([], ["b"])


def refused(out: Path, model: Callable[[], nn.Module], **given: Any) -> TruelineError:
    with pytest.raises(TruelineError) as found:
        capture(recipe(model, **given), None, out, formats=["torch_export"])
    assert not out.exists()
    return found.value


def trained() -> Mlp:
    """A model whose BatchNorm answers otherwise in training, and which is left there."""
    torch.manual_seed(0)
    model = Mlp()
    for _ in range(3):
        model(torch.randn(16, 8) * 3 + 1)
    return model.train()


@pytest.mark.jobs
def test_a_model_left_in_training_mode_is_captured_in_evaluation_mode(out: Path) -> None:
    model = trained()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    capture(recipe(lambda: model), None, out, formats=["torch_export"])
    x = torch.randn(5, 8) * 3 + 1
    answer = open_program(open_bundle(out)).run({"x": x.numpy()})["output"]
    with torch.no_grad():
        np.testing.assert_allclose(answer, model.eval()(x).numpy(), atol=1e-5)
        assert np.abs(answer - model.train()(x).numpy()).max() > 0.1
    model.load_state_dict({**model.state_dict(), **before})


@pytest.mark.slow
def test_a_model_that_turns_itself_to_training_mode_is_refused_with_its_part(out: Path) -> None:
    error = refused(out, TurnsItself)
    assert isinstance(error, CaptureError)
    assert "turns itself to training mode" in error.message
    assert "self.train()" in error.hint


def test_a_model_that_wants_a_device_that_is_not_here_is_refused_with_what_torch_says(out: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    error = refused(out, Elsewhere)
    assert isinstance(error, CaptureError)
    assert "cannot be called with its own example" in error.message
    assert "CUDA" in error.message or "cuda" in error.message
    assert "a device that is not here" in error.hint


def test_a_model_without_its_parameters_is_refused_with_where_it_lies(out: Path) -> None:
    def meta() -> nn.Module:
        with torch.device("meta"):
            return Mlp()

    error = refused(out, meta)
    assert isinstance(error, RecipeError)
    assert "the model is on meta and cannot be moved to the CPU" in error.message


def test_an_example_without_numbers_is_refused(out: Path) -> None:
    error = refused(out, Mlp, examples=lambda: torch.empty(4, 8, device="meta"))
    assert isinstance(error, RecipeError)
    assert "on device 'meta'" in error.message


def test_a_model_that_answers_nan_to_its_own_example_is_refused_with_how_many(out: Path) -> None:
    error = refused(out, Nan)
    assert isinstance(error, NotProven)
    assert "answers NaN to its own example, in 32 of 32 elements of 'output'" in error.message
    assert "checkpoint" in error.hint


def test_a_recipe_that_fails_to_import_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("import torch\nmodel = torch.no_such_thing\n")
    with pytest.raises(RecipeError, match=r"recipe\.py:2"):
        load_recipe(tmp_path / "recipe.py")


def raises() -> Any:
    raise ZeroDivisionError("of my own")


@pytest.mark.parametrize(
    ("blanks", "words"),
    [
        ({"model": raises}, r"model\(\) raises ZeroDivisionError: of my own; see .*test_bad_input.py:\d+: raise Zero"),
        ({"model": Mlp, "examples": raises}, r"examples\(\) raises ZeroDivisionError"),
        ({"model": lambda: Mlp}, r"model\(\) returned the class Mlp, expected a torch.nn.Module"),
        ({"model": lambda: None}, r"model\(\) returned a NoneType"),
    ],
)
def test_what_a_blank_of_the_recipe_raises_is_one_error_with_its_line(
    out: Path, blanks: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        capture(recipe(**blanks), None, out, formats=["torch_export"])


def test_an_example_of_no_records_is_refused(out: Path) -> None:
    assert "holds no record" in refused(out, Mlp, examples=lambda: torch.randn(0, 8)).message


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    capture(recipe(Mlp), None, tmp_path / "b", formats=["torch_export"])
    return tmp_path / "b"


@pytest.mark.jobs
def test_a_bundle_of_a_newer_schema_is_refused_with_both_numbers(captured: Path) -> None:
    manifest = json.loads((captured / "bundle.json").read_text())
    (captured / "bundle.json").write_text(json.dumps({**manifest, "schema": 2, "something": "new"}))
    with pytest.raises(BundleError, match="follows bundle schema 2, this Trueline reads schema 1") as found:
        open_bundle(captured)
    assert "capture the model again" in found.value.hint


@pytest.mark.jobs
def test_a_program_that_is_torn_is_refused_by_bundle_and_by_session(captured: Path) -> None:
    bundle = open_bundle(captured)
    path = bundle.program_path()
    whole = path.read_bytes()
    for torn in (whole[: len(whole) // 2], whole[:100], b""):
        path.write_bytes(torn)
        with pytest.raises(BundleError, match=r"model\.pt2 has \d+ bytes, sealed were \d+: it is torn"):
            open_bundle(captured)
        with pytest.raises(BundleError, match=r"model\.pt2"):
            open_session("torch_export", path, bundle.signature)


@pytest.mark.jobs
def test_a_program_that_was_tampered_with_is_refused_by_bundle(captured: Path) -> None:
    path = open_bundle(captured).program_path()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.pt2 was changed after it was sealed"):
        open_bundle(captured)


@pytest.mark.jobs
@pytest.mark.slow
def test_missing_external_data_is_named_by_bundle_and_refused_by_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emit, "EXTERNAL_BYTES", 0)
    monkeypatch.setattr(Wide, "width", 512)
    capture(recipe(Wide), None, tmp_path / "b", formats=["onnx"])
    bundle = open_bundle(tmp_path / "b")
    (data,) = [name for name in bundle.manifest.files if name.startswith("programs/") and name.endswith(".data")]
    x = np.ones((1, 8), np.float32)
    assert open_program(bundle).run({"x": x})["output"].shape == (1, 8)
    whole = sum(bundle.manifest.files[name].size for name in (data, data.removesuffix(".data")))
    assert whole > 2 * 512 * 8 * 4
    assert f"  {whole} B  " in describe(bundle)  # the weights are part of the program's size
    (tmp_path / "b" / data).unlink()
    with pytest.raises(BundleError, match=data.replace(".", r"\.")):
        open_bundle(tmp_path / "b")
    with pytest.raises(BundleError, match=r"reads its weights from .model\.onnx\.data., which is no file beside it"):
        open_session("onnx", bundle.program_path(), bundle.signature)


class Wide(nn.Module):
    width = 16

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, self.width), nn.Linear(self.width, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(x)))
        return found


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("owner", "name", "format"),
    few(
        [
            (zipfile.ZipFile, "writestr", "torch_export"),
            (os, "fsync", "torch_export"),
            pytest.param(onnx_ir, "save", "onnx", marks=pytest.mark.slow),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_a_disk_that_is_full_while_emitting_or_sealing_is_said_and_nothing_is_left(
    out: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, format: str
) -> None:
    with monkeypatch.context() as patched:
        if owner is zipfile.ZipFile:
            patched.setattr("trueline.runtime.torch_export_archive.zipfile.ZipFile.writestr", full)
        else:
            patched.setattr(owner, name, full)
        with pytest.raises(StorageError, match="no room left"):
            capture(recipe(Mlp), None, out, formats=[format])
    assert not out.exists()


@pytest.mark.jobs
def test_a_full_disk_does_not_take_the_bundle_that_was_there(captured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_bundle(captured).digest
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="no room left"):
            capture(recipe(Mlp), None, captured, formats=["torch_export"], overwrite=True)
    assert open_bundle(captured).digest == before
    assert [path.name for path in captured.parent.iterdir()] == ["b"]


class Doubled(nn.Module):
    """Computes in a precision that ONNX Runtime has no convolution of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.double()[:, None]).flatten(1).float()  # doubled


@pytest.mark.jobs
def test_a_precision_that_a_runtime_has_not_is_refused_by_name_with_the_line_and_no_folder(out: Path) -> None:
    found = capture(recipe(Doubled), None, out)
    attempts = {one["format"]: one for one in open_bundle(out).lineage()["attempts"]}
    assert attempts["onnx"]["verdict"] == "refused"
    assert attempts["onnx"]["emitted"]
    assert "it computes in double there" in attempts["onnx"]["why"]
    assert attempts["onnx"]["line"] == marks.place_of(__file__, "doubled")
    assert str(out.parent) not in json.dumps(attempts)
    assert attempts["torch_export"]["verdict"] == "proven"
    assert found.serve == "torch_export"


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True).squeeze()  # squeezed


class Beside(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:  # beside
        return {"y": x, "temperature": 0.5}


class Sometimes(nn.Module):
    """An output more where values are large."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = {"y": x * 2}
        if x.max() > 100:  # sometimes
            found["warning"] = x.max(-1)[0]
        return found


class Unlike(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:  # unlike
        return torch.cat([x, h]).view(5, 4)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # sparse
        return x.to_sparse()


class Waves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # waves
        return torch.fft.fft(x)


@pytest.mark.parametrize(
    ("model", "examples", "words", "mark"),
    few(
        [
            (Squeezed, torch.randn(3, 4), "has shape", "squeezed"),
            (Beside, torch.randn(3, 4), "'temperature' of the model is a float, not a tensor", "beside"),
            (Sometimes, torch.randn(3, 4), "the model returned 2 tensors, and 1 on its example", "sometimes"),
            (Unlike, (torch.randn(3, 4), torch.randn(2, 4)), r"\(x: \[3, 4\], h: \[2, 4\]\)", "unlike"),
            (Sparse, torch.randn(3, 4), r"output 'output' is torch.sparse_coo, which no bundle", "sparse"),
            (Waves, torch.randn(3, 4), r"output 'output' is complex \(torch.complex64\)", "waves"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_a_refusal_of_the_form_of_inputs_and_outputs_names_the_users_line(
    tmp_path: Path, model: type[nn.Module], examples: Any, words: str, mark: str
) -> None:
    with pytest.raises(CaptureError, match=words) as refused:
        capture(recipe(model, lambda: examples), None, tmp_path / "b", formats=["torch_export", "torchscript"])
    assert marks.place_of(__file__, mark) in refused.value.message
    assert {
        "squeezed": "squeeze(-1)",
        "beside": "make a tensor of the number",
        "sometimes": "return all of them always",
        "unlike": "dynamic_shapes() declares it",
        "sparse": ".to_dense()",
        "waves": "torch.view_as_real(y)",
    }[mark] in (refused.value.hint)
