"""Checkpoint in, bundle out, and nothing in it that was not proven."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickletools
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trueline import events
from trueline.bundle import Bundle, open_bundle
from trueline.bundle.describe import describe
from trueline.capture.api import Captured, capture
from trueline.capture.proof.attempt import Attempt
from trueline.checkpoint import checkpoint
from trueline.cli.app import run
from trueline.data.source import Batch
from trueline.errors import CaptureError, NotProven, RecipeError, RequestError, StorageError, UsageError
from trueline.recipe.contract import Recipe
from trueline.runtime.open import open_program, replay
from trueline.runtime.session import USUAL
from worlds import TESTS, models
from worlds.models import Branch, Counter, Eigen, Mlp, OnlyMany, ShapeBranch
from worlds.recipes import never, untrained


def recipe(model: Callable[[], nn.Module], **blanks: Any) -> Recipe:
    if "dataset" not in blanks:
        blanks.setdefault("examples", lambda: torch.randn(4, 8))
    return untrained(model, name="digits", **blanks)


class Rows:
    """A Source of rows that count up."""

    def __init__(self, count: int) -> None:
        self.num_records = count
        self.units = ()

    def read(self, indices: Any) -> Batch:
        x = torch.as_tensor(indices, dtype=torch.float32)[:, None].repeat(1, 8)
        return Batch(x, x[:, 0])

    def fingerprint(self) -> str:
        return "f" * 64


@dataclass(frozen=True)
class Made:
    """A model and its bundle, which tests only read."""

    model: nn.Module
    captured: Captured

    @property
    def bundle(self) -> Bundle:
        return open_bundle(self.captured.path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(0)
    model = Mlp()
    return Made(model, capture(recipe(lambda: model), None, tmp_path_factory.mktemp("made") / "digits.bundle"))


def test_a_captured_bundle_answers_as_the_eager_model_in_every_format(made: Made) -> None:
    assert [(one.format, one.verdict) for one in made.captured.programs] == [
        ("onnx", "proven"),
        ("torch_export", "proven"),
    ]
    assert all(one.seconds > 0 and one.size_bytes > 0 and one.probes > 20 for one in made.captured.programs)
    assert made.bundle.digest == made.captured.digest
    assert made.bundle.manifest.serve == "onnx"
    x = torch.randn(7, 8)
    wanted = made.model.eval()(x).detach().numpy()
    for format in ("onnx", "torch_export"):
        session = open_program(made.bundle, format, threads=1)
        np.testing.assert_allclose(session.run({"x": x.numpy()})["output"], wanted, atol=1e-5)
        assert list(replay(made.bundle, session)) == ["batch-1", "batch-2", "batch-5"]


def test_every_probe_is_evidence_with_versions_and_the_attempts_are_on_record(made: Made) -> None:
    evidence = list(made.bundle.evidence())
    assert len(evidence) == sum(one.probes for one in made.captured.programs)
    assert {1, 2, 3, 5, 8, 17, 32} <= {one.shapes["x"][0] for one in evidence}
    assert all(one.versions["torch"] == torch.__version__ for one in evidence)
    attempts = made.bundle.lineage()["attempts"]
    assert [(one["format"], one["verdict"], one["emitted"]) for one in attempts] == [
        ("onnx", "proven", True),
        ("torch_export", "proven", True),
    ]
    for one, sealed in zip(attempts, made.bundle.manifest.programs, strict=True):
        assert one["seconds"] == sealed.seconds > 0
        assert one["probes"] == sealed.probes
        assert one["size_bytes"] >= made.bundle.manifest.files[sealed.file].size > 0
    assert made.captured.serve == made.bundle.manifest.serve == "onnx"


def test_a_branch_on_values_is_refused_with_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotProven) as refused:
        capture(recipe(Branch), None, tmp_path / "b", formats=USUAL, one_is_enough=True)
    assert models.place_of("data branch") in refused.value.message
    assert "if x.sum() > 0:" in refused.value.message
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.jobs
@pytest.mark.slow
def test_torchscript_stands_in_where_no_graph_can_hold_the_model_and_every_refusal_is_on_record(tmp_path: Path) -> None:
    captured = capture(recipe(Branch), None, tmp_path / "b")
    assert {one.format: one.verdict for one in captured.programs} == {
        "onnx": "refused",
        "torch_export": "refused",
        "torchscript": "proven",
    }
    bundle = open_bundle(tmp_path / "b")
    assert captured.serve == bundle.manifest.serve == "torchscript"
    onnx, export, script = bundle.lineage()["attempts"]
    for refused in (onnx, export):
        assert (refused["emitted"], refused["size_bytes"]) == (False, 0)
        assert refused["line"] == models.place_of("data branch")
        assert "torch.export cannot follow the model" in refused["why"]
    assert script["emitted"]
    assert script["size_bytes"] > 0
    session = open_program(bundle)
    for sign in (1, -1):  # both ways
        x = np.full((3, 8), sign, np.float32)
        assert (session.run({"x": x})["output"] == (x * 2 if sign > 0 else x - 1)).all()
    shown = describe(bundle)
    assert "refused, not emitted" in shown
    assert models.place_of("data branch") in shown


@pytest.mark.jobs
def test_a_branch_on_the_shape_leaves_a_range_that_every_program_enforces(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    with events.listening(lambda name, fields: seen.append(fields) if name == "program.proven" else None):
        captured = capture(recipe(ShapeBranch), None, tmp_path / "b")
    assert "onnx: proven for batch from 1 to 6, because of" in captured.programs[0].summary
    assert all(fields["range"] == "batch from 1 to 6" for fields in seen)
    assert all(models.place_of("shape branch") in str(fields["bound_by"]) for fields in seen)
    bundle = open_bundle(tmp_path / "b")
    for format in ("onnx", "torch_export"):
        session = open_program(bundle, format)
        assert (session.run({"x": np.zeros((6, 8), np.float32)})["output"] == 1).all()
        with pytest.raises(RequestError, match="at most 6"):
            session.run({"x": np.zeros((9, 8), np.float32)})


@pytest.mark.jobs
def test_a_program_that_holds_for_large_batches_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="a server has to answer a single request"):
        capture(recipe(OnlyMany), None, tmp_path / "b", formats=["torch_export"])


def test_a_model_with_a_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="equal inputs differently"):
        capture(recipe(Counter), None, tmp_path / "b", formats=["torch_export"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.jobs
@pytest.mark.slow
def test_a_format_that_cannot_be_had_is_an_error_only_for_who_asked_for_it(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match=r"onnx program of 'digits' is not proven: .*linalg_eig") as refused:
        capture(recipe(Eigen), None, tmp_path / "all", formats=USUAL)
    assert refused.value.hint.endswith("torch_export")
    captured = capture(recipe(Eigen), None, tmp_path / "some")
    assert {one.format: one.verdict for one in captured.programs} == {"onnx": "refused", "torch_export": "proven"}
    assert open_bundle(tmp_path / "some").manifest.serve == "torch_export"
    assert capture(recipe(Eigen), None, tmp_path / "one", formats=["torch_export"]).programs


def test_a_bundle_holds_no_pickle_and_no_path_of_this_machine(made: Made) -> None:
    for name, content in every_file(made.captured.path):
        assert not name.endswith((".pkl", ".pt", ".py")) or not content, name
        assert not holds_pickle(content), name
        for path in (str(TESTS), "site-packages", str(made.captured.path.parent)):
            assert path.encode() not in content, name


def every_file(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.name, path.read_bytes()
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    yield from ((f"{path.name}:{name}", archive.read(name)) for name in archive.namelist())


CALLING = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "REDUCE", "BUILD"}


def holds_pickle(content: bytes) -> bool:
    """Whether the bytes, or what begins at a protocol mark in them, read as a pickle that does something."""
    starts = [0] + [i for i in range(len(content) - 1) if content[i] == 0x80 and content[i + 1] in (2, 3, 4, 5)]
    for start in starts:
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            if {op.name for op, _, _ in pickletools.genops(content[start:])} & CALLING:
                return True
    return False


def test_the_search_for_pickles_finds_one(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    assert any(holds_pickle(content) for _, content in every_file(tmp_path))


@pytest.mark.jobs
@pytest.mark.slow
def test_the_lineage_says_recipe_data_checkpoint_and_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Mlp()
    facts = {"recipe": {"name": "digits", "digest": "d" * 64}, "certificates": [{"steps": 120, "ok": True}]}
    trained = checkpoint.write(tmp_path / "job", step=120, state={"model": model.state_dict()}, facts=facts)
    monkeypatch.setattr(Recipe, "source", lambda self, mode: Rows(3))
    capture(recipe(Mlp, dataset=never), trained, tmp_path / "b", formats=["torch_export"])
    bundle = open_bundle(tmp_path / "b")
    lineage = bundle.lineage()
    assert lineage["recipe"] == {"name": "digits", "digest": "d" * 64}
    assert lineage["data"]["fingerprint"] == "f" * 64
    assert lineage["data"]["mode"] == "evaluation"
    assert lineage["checkpoint"]["digest"] == checkpoint.read_manifest(trained)["digest"]
    assert lineage["certificates"] == [{"steps": 120, "ok": True}]
    assert (bundle.manifest.lineage.step, lineage["parent"]) == (120, None)
    x = np.ones((2, 8), np.float32)
    wanted = model.eval()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(open_program(bundle).run({"x": x})["output"], wanted, atol=1e-5)


@pytest.mark.jobs
def test_golden_examples_are_the_users_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recipe, "source", lambda self, mode: Rows(9))
    capture(recipe(Mlp, dataset=never), None, tmp_path / "b", formats=["torch_export"])
    golden = open_bundle(tmp_path / "b").golden()
    assert golden[2].inputs["x"][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_recipe_that_gives_no_example_is_told_which_blank_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recipe, "source", lambda self, mode: Rows(0))
    with pytest.raises(RecipeError) as refused:
        capture(recipe(Mlp, dataset=never), None, tmp_path / "b")
    assert "evaluation: no records; training: no records" in refused.value.message
    assert "examples()" in refused.value.hint


def test_an_example_that_does_not_fit_the_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="cannot be called with its own example"):
        capture(recipe(Mlp, examples=lambda: torch.randn(4, 9)), None, tmp_path / "b")


@pytest.mark.jobs
@pytest.mark.slow
def test_one_example_as_numpy_is_enough(tmp_path: Path) -> None:
    one = recipe(Mlp, examples=lambda: {"x": np.ones((1, 8), np.float32)})
    capture(one, None, tmp_path / "b", formats=["torch_export"])
    assert open_bundle(tmp_path / "b").signature.dims["batch"].min == 1


def test_usage_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    broken = recipe(never)
    with pytest.raises(UsageError, match="no program format 'onxx'") as wrong:
        capture(broken, None, tmp_path / "b", formats=["onxx"])
    assert wrong.value.hint == "did you mean 'onnx'?"
    with pytest.raises(UsageError, match="at least one"):
        capture(broken, None, tmp_path / "b", formats=[])
    (tmp_path / "b").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        capture(broken, None, tmp_path / "b")


@pytest.mark.jobs
@pytest.mark.slow
def test_capturing_again_replaces_the_bundle_when_asked(tmp_path: Path) -> None:
    first = capture(recipe(Mlp), None, tmp_path / "b", formats=["torch_export"])
    again = capture(recipe(Mlp), None, tmp_path / "b", formats=["torch_export"], overwrite=True)
    assert again.digest != first.digest
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


RECIPE = """
import torch
def model(): return torch.nn.Linear(3, 2)
def examples(): return torch.randn(4, 3)
"""


@pytest.mark.slow
def test_weights_in_a_file_need_a_model_and_examples_alone(tmp_path: Path) -> None:
    (tmp_path / "lines.py").write_text(RECIPE)
    torch.save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, tmp_path / "lines.pt")
    assert run(["capture", f"{tmp_path}/lines.py", f"{tmp_path}/lines.pt", "--out", f"{tmp_path}/b", "-q"]) == 0
    bundle = open_bundle(tmp_path / "b")
    assert bundle.lineage()["checkpoint"]["file"] == "lines.pt"
    answer = open_program(bundle).run({bundle.signature.inputs[0].name: np.ones((1, 3), np.float32)})
    assert next(iter(answer.values())).tolist() == [[3.0, 3.0]]
    against = ["--against", f"{tmp_path}/lines.py", "--checkpoint", f"{tmp_path}/lines.pt"]
    assert run(["bundle", "verify", f"{tmp_path}/b", *against]) == 0


@pytest.mark.jobs
@pytest.mark.slow
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="no room left"):
            capture(recipe(Mlp), None, tmp_path / "b", formats=["torch_export"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.jobs
def test_progress_is_told_as_it_is_made(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    with events.listening(lambda name, fields: seen.append((name, dict(fields)))):
        capture(recipe(Mlp), None, tmp_path / "b", formats=["torch_export"])
    names = list(dict.fromkeys(name for name, _ in seen))
    began = ["capture.started", "model.examined", "model.tracing", "model.observed", "program.emitting"]
    assert names == [*began, "program.emitted", "proof.advanced", "program.proven", "bundle.sealed"]
    steps = [fields for name, fields in seen if name == "proof.advanced"]
    assert [step["done"] for step in steps] == list(range(1, steps[0]["total"] + 1))


@pytest.mark.slow
def test_a_bundle_is_served_without_the_recipe_and_without_torch(made: Made) -> None:
    code = """
import sys
from pathlib import Path
from trueline.bundle import open_bundle
from trueline.runtime.open import open_program, replay
bundle = open_bundle(Path(sys.argv[1]))
assert len(replay(bundle, open_program(bundle))) == 3
sys.exit("torch imported" if "torch" in sys.modules else 0)
"""
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(made.captured.path)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_a_golden_example_that_fails_on_this_machine_is_named(made: Made) -> None:
    session = open_program(made.bundle)

    def wrong(inputs: Any) -> Any:
        return {name: array + 1 for name, array in session.run(inputs).items()}

    off: Any = SimpleNamespace(format="onnx", signature=session.signature, run=wrong)
    with pytest.raises(NotProven, match="golden record 'batch-1'"):
        replay(made.bundle, off)


def test_importing_capture_imports_no_torch() -> None:
    code = "import sys, trueline.capture; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_evidence_is_readable_line_by_line_without_trueline(made: Made) -> None:
    lines = (made.captured.path / "evidence.jsonl").read_text().splitlines()
    assert all(json.loads(line)["verdict"] == "agrees" for line in lines)


def test_a_record_of_an_attempt_names_files_and_no_folder_of_the_machine() -> None:
    attempt = Attempt(
        format="onnx",
        verdict="refused",
        emitted=False,
        why="/home/a b/x.py: no; see '/home/ada/nets/model.py:7' (length/2/4 != 1, /srv/t/a.onnx)",
        line="/home/ada/nets/model.py:7: if x.sum() > 0: (goes another way)",
        seconds=1.23456,
        size_bytes=0,
        probes=0,
        max_abs_error=0.0,
    )
    record = attempt.as_record()
    assert record["line"] == "model.py:7"
    assert record["why"].endswith("; see 'model.py:7' (length/2/4 != 1, a.onnx)")
    assert record["seconds"] == 1.235
    assert "how" not in record
    assert "ada" not in json.dumps(record)
