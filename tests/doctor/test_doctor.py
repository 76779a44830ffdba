"""Each submodule that cannot be captured is named with its line, and no rewrite is shown that was not proven."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches.stand_ins import size_lengths
from trueline.capture.time_limit import TimeLimit
from trueline.cli.app import run
from trueline.doctor.api import calls_of, doctor, read_progress
from trueline.doctor.examine import ask_original, examine
from trueline.doctor.patch import patch_module
from trueline.doctor.recorded_calls import agree, answer_of
from trueline.doctor.report import Cause, Diagnosis, Rewrite, Row, page, text
from trueline.doctor.survey import Survey, survey
from trueline.errors import CaptureError, UsageError
from trueline.runtime import graph
from worlds import TESTS, models
from worlds.cases import few

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def examined(model: nn.Module, x: Tensor, dynamic: tuple[int, ...] = ()) -> Survey:
    model = model.eval()
    eager = EagerSession(model, x, dynamic_shapes={"x": {axis: f"x.{axis}" for axis in dynamic}})
    return survey(model, calls_of(eager), onnx=None, base=TESTS)


def whole(model: nn.Module, x: Tensor, dynamic: tuple[int, ...] = ()) -> Row:
    return examined(model, x, dynamic).rows["(model)"]


class _Endless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while torch.jit.is_tracing():
            pass
        return x * 2


@pytest.mark.jobs
def test_a_whole_that_is_torchs_own_container_is_a_row_as_any_other() -> None:
    model = nn.Sequential(_Root()).eval()  # annotations of its file name what the file never imports
    rows = survey(model, calls_of(EagerSession(model, torch.randn(3, 4))), onnx=None, base=TESTS).rows
    assert rows["(model)"].status == "blocked"


@pytest.mark.long
def test_a_submodule_whose_examination_does_not_end_is_listed_with_its_line_and_the_others_are_examined() -> None:
    model = nn.Sequential(_Root(), _Endless()).eval()
    limit = TimeLimit(minutes=0.1)
    rows = survey(model, calls_of(EagerSession(model, torch.ones(3, 4))), onnx=None, base=TESTS, limit=limit).rows
    assert rows["1"].status == "blocked"
    assert "not tried for want of time: submodule 1 did not end" in rows["1"].why_not
    assert "while torch.jit.is_tracing()" in rows["1"].why_not or "pass" in rows["1"].why_not
    assert "want of time" not in rows["0"].why_not
    assert set(rows) == {"(model)", "0", "1"}


class _Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sym_sqrt(x.shape[0])  # an operator that no bundle holds


def test_a_program_that_no_bundle_holds_is_refused_by_the_doctor_as_by_capture() -> None:
    row = whole(_Root(), torch.randn(3, 4))
    assert row.status == "blocked"
    assert row.cause is not None
    assert row.cause.words.endswith("model.json calls 'torch._sym_sqrt'; a bundle holds aten operators only")
    assert "/tmp" not in row.cause.words


@pytest.mark.parametrize(
    ("model", "mark", "kind", "edit"),
    [
        (models.BranchThenMore, "value branch", "value branch", "+        y = torch.where("),
        (models.EarlyReturn, "early return", "value branch", "+        return torch."),
        (models.ShapeBranch, "shape branch", "size branch", "+        x = torch.where(torch.full((), x.shape[0]) > 6"),
        (models.Experts, "experts", "value branch", "-            if mask.any():"),
    ],
)
def test_a_branch_is_named_with_its_line_and_its_rewrite_is_proven(
    model: type[nn.Module], mark: str, kind: str, edit: str
) -> None:
    row = whole(model(), torch.randn(3, 4))
    assert row.status == "rewritten"
    assert not row.exportable
    assert row.cause is not None
    assert (row.cause.kind, row.cause.line) == (kind, models.line_of(mark))
    assert row.rewrite is not None
    assert row.rewrite.probes >= 10
    assert edit in row.rewrite.diff


def test_a_class_without_a_file_is_named_with_the_advice_to_put_it_into_one() -> None:
    typed: dict[str, Any] = {"torch": torch}
    text = "class Typed(torch.nn.Module):\n    def forward(self, x):\n        return x + 1 if x.sum() > 0 else -x\n"
    exec(text, typed)
    row = whole(typed["Typed"](), torch.randn(3, 4))
    assert row.why_not == "Typed is not in a file (<string>): move it into a module, where it can be rewritten"


@pytest.mark.jobs
def test_a_number_taken_out_of_a_tensor_stays_a_tensor() -> None:
    row = whole(models.Number(), torch.randn(3, 4))
    assert row.status == "rewritten"
    assert row.rewrite is not None
    assert "+        scale = x.mean()\n" in row.rewrite.diff


def test_a_mean_of_what_a_mask_selects_is_taken_with_weights() -> None:
    row = whole(models.Chosen(), torch.randn(3, 4))
    assert row.status == "rewritten"
    assert row.cause is not None
    assert row.cause.line == models.line_of("masked mean")
    assert row.rewrite is not None
    assert "-            centre = x[mask].mean()" in row.rewrite.diff
    assert "torch.where(" in row.rewrite.diff


def test_a_loop_over_time_that_carries_nothing_is_done_at_once() -> None:
    row = whole(models.Steps(), torch.randn(3, 5, 4), dynamic=(1,))
    assert row.status == "rewritten"
    assert row.cause is not None
    assert (row.cause.kind, row.cause.line) == ("time loop", models.line_of("steps"))
    assert row.rewrite is not None
    assert "scan" not in row.rewrite.diff


def test_a_recurrence_over_time_becomes_a_scan_that_holds_for_other_lengths() -> None:
    row = whole(models.Recurrence(), torch.randn(3, 5, 4), dynamic=(1,))
    assert row.status == "rewritten"
    assert row.rewrite is not None
    assert "scan(" in row.rewrite.diff


@pytest.mark.jobs
@pytest.mark.parametrize("model", few([models.Gated, models.Turned], 1, pytest.mark.jobs))
def test_the_rewrite_of_a_recurrence_runs_for_a_single_record_too(model: type[nn.Module]) -> None:
    found = examined(model(), torch.randn(3, 5, 4), dynamic=(1,))
    assert found.rows["(model)"].status == "rewritten"
    one = torch.randn(1, 5, 4)
    with torch.no_grad():
        torch.testing.assert_close(patch_module(model().eval(), found.texts)(one), model()(one))


@pytest.mark.jobs
def test_a_size_that_python_makes_a_number_of_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole(models.Length(), torch.randn(3, 5, 4), dynamic=(1,)).status == "ready"
    for name in ("may_help", "makes_slices"):  # as where `int` is a name of the file's own, and nothing is sliced
        monkeypatch.setattr(size_lengths, name, lambda module: False)
    row = whole(models.Length(), torch.randn(3, 5, 4), dynamic=(1,))
    assert row.status == "rewritten"
    assert row.cause is not None
    assert (row.cause.kind, row.cause.line) == ("fixed size", models.line_of("int"))
    assert row.rewrite is not None
    assert "+        rows = self.seed.expand(x.shape[0], -1)" in row.rewrite.diff
    assert "+        steps = x.shape[1]" in row.rewrite.diff


@pytest.mark.jobs
def test_a_while_on_a_value_becomes_a_while_loop() -> None:
    row = whole(models.Halve(), torch.randn(3, 4))
    assert row.status == "rewritten"
    assert row.cause is not None
    assert (row.cause.kind, row.cause.line) == ("value loop", models.line_of("while"))
    assert row.rewrite is not None
    assert "while_loop(" in row.rewrite.diff


def followed(model: nn.Module, texts: dict[str, str], calls: int = 9) -> None:
    """Asks the rewritten model call after call beside a fresh copy of the original."""
    original, edited = copy.deepcopy(model).eval(), patch_module(model.eval(), texts)
    for i in range(calls):
        x = torch.randn(1 + i % 4, 4)
        with torch.no_grad():
            torch.testing.assert_close(edited(x), original(x))


def test_a_counter_becomes_a_buffer_and_is_proven_over_calls_in_a_row() -> None:
    model = models.Counter()
    found = examined(model, torch.randn(3, 4))
    row = found.rows["(model)"]
    assert row.status == "rewritten"
    assert row.cause is not None
    assert (row.cause.kind, row.cause.line) == ("state", models.line_of("counter"))
    assert row.rewrite is not None
    assert row.rewrite.state == ("calls",)
    assert row.rewrite.probes >= 10
    assert "+        self.register_buffer('calls', torch.tensor(0), persistent=False)\n" in row.rewrite.diff
    assert "+        self.calls = self.calls + 1\n" in row.rewrite.diff
    assert "--state explicit" in row.rewrite.steps[0]
    followed(models.Counter(), found.texts)
    assert "with its state explicit (calls)" in text(Diagnosis(recipe="m", rows=(row,), before=None))


@pytest.mark.jobs
def test_what_a_model_keeps_in_several_attributes_becomes_buffers_and_nothing_is_dropped() -> None:
    found = examined(models.Remembered(), torch.randn(3, 4))
    row = found.rows["(model)"]
    assert row.cause is not None
    assert (row.cause.kind, row.cause.line) == ("state", models.line_of("remembered"))
    assert row.rewrite is not None
    assert set(row.rewrite.state) == {"rows", "weight", "last"}
    assert "self.rows.sum(0) / self.rows.shape[0]" in row.rewrite.diff
    followed(models.Remembered(), found.texts)


def test_a_state_that_is_no_tensor_is_named_and_never_frozen() -> None:
    row = whole(models.Diary(), torch.randn(3, 4))
    assert row.status == "blocked"
    assert row.rewrite is None
    assert row.cause is not None
    assert (row.cause.kind, row.cause.line) == ("state", models.line_of("diary"))
    assert "differs" in row.why_not


def test_a_state_in_buffers_is_ready_and_says_how_it_is_captured() -> None:
    row = whole(models.Running(4), torch.randn(3, 4))
    assert row.status == "ready"
    assert "(total): capture it with --state explicit" in row.why_not


@pytest.mark.jobs
def test_the_whole_is_examined_with_the_state_of_a_rewritten_part() -> None:
    found = examined(models.Halves(), torch.randn(3, 4))
    assert {path: row.status for path, row in found.rows.items()} == {
        "(model)": "waits",
        "counter": "rewritten",
        "branch": "rewritten",
    }
    followed(models.Halves(), found.texts)


def test_a_rewrite_that_forgets_between_calls_is_not_taken_for_proven() -> None:
    model = models.Counter().eval()
    oracle = ask_original(model, calls_of(EagerSession(models.Counter().eval(), torch.randn(3, 4))))
    source = Path(models.__file__).read_text()
    kept = source.replace("self.calls = 0", "self.register_buffer('calls', torch.tensor(0), persistent=False)")
    right = kept.replace("self.calls += 1  # counter", "self.calls = self.calls + 1  # counter")
    wrong = kept.replace("self.calls += 1  # counter", "self.calls = torch.full_like(self.calls, 1)  # counter")
    assert examine(patch_module(model, {models.__file__: right}), oracle).reason == ""
    assert "differs" in examine(patch_module(model, {models.__file__: wrong}), oracle).reason


@pytest.mark.jobs
def test_a_loop_in_a_decorated_function_of_the_file_is_rewritten_there() -> None:
    found = examined(models.Decorated(), torch.randn(3, 5, 4), dynamic=(1,))
    row = found.rows["(model)"]
    assert row.status == "rewritten"
    assert row.cause is not None
    assert (row.cause.kind, row.cause.line) == ("time loop", models.line_of("in a function"))
    assert row.rewrite is not None
    assert "scan(" in row.rewrite.diff
    x = torch.randn(2, 7, 4)
    with torch.no_grad():
        torch.testing.assert_close(patch_module(models.Decorated(), found.texts)(x), models.Decorated()(x))


def test_a_freed_size_that_is_taken_in_multiples_only_is_proven_for_them_and_refused_for_all() -> None:
    model, x = models.Strided().eval(), torch.randn(3, 2, 16, 32)
    eager = EagerSession(model, x, dynamic_shapes={"x": {2: "height", 3: "width"}})
    oracle = ask_original(model, calls_of(eager))
    source = Path(models.__file__).read_text()
    freed = source.replace("int(x.shape[2]), int(x.shape[3])", "x.shape[2], x.shape[3]")
    assert freed != source
    edited = patch_module(model, {models.__file__: freed})
    assert examine(edited, oracle).reason
    found = examine(edited, oracle, in_units=True)
    assert not found.reason
    assert max(found.divisors.values()) in (2, 4)


def test_statistics_that_no_answer_depends_on_are_kept_in_training_only() -> None:
    row = whole(models.Statistics(), torch.randn(3, 4))
    assert row.status == "rewritten"
    assert row.cause is not None
    assert row.cause.line == models.line_of("statistics")
    assert row.rewrite is not None
    assert "if self.training:" in row.rewrite.diff


class _Caught(nn.Module):
    """torch.jit.trace ends the process where an operator fails and the model catches that."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.linalg.cholesky(x - 9)
        except RuntimeError:
            return x * 2


def test_a_model_that_catches_an_error_of_torch_is_examined_like_any_other() -> None:
    assert not whole(_Caught(), torch.zeros(3, 4, 4)).traceable


def test_a_model_without_a_copy_is_refused_with_the_attribute_that_has_none() -> None:
    model = models.Opaque().eval()
    model.rows = (row for row in range(9))
    with pytest.raises(CaptureError, match=r"cannot be copied.*\(rows\): cannot pickle 'generator'"):
        whole(model, torch.randn(3, 4))


def test_what_nobody_can_rewrite_is_said_with_its_line() -> None:
    row = whole(models.Opaque(), torch.randn(3, 4))
    assert row.status == "blocked"
    assert row.cause is not None
    assert row.cause.line == models.line_of("digits")
    assert row.why_not


@pytest.mark.jobs
def test_only_the_part_that_needs_it_is_rewritten_and_the_whole_waits_for_it() -> None:
    found = examined(models.Whole(), torch.randn(3, 4))
    assert {path: row.status for path, row in found.rows.items()} == {
        "(model)": "waits",
        "first": "ready",
        "middle": "rewritten",
        "last": "ready",
    }
    assert list(found.rows) == ["(model)", "first", "middle", "last"]


@pytest.mark.jobs
def test_the_edited_text_runs_with_the_models_own_parameters() -> None:
    model = models.EarlyReturn().eval()
    found = examined(model, torch.randn(3, 4))
    oracle = ask_original(model, calls_of(EagerSession(model, torch.randn(5, 4))))
    edited = patch_module(model, found.texts)
    assert not examine(edited, oracle).reason
    assert all(not agree(a, answer_of(edited, c))[0] for a, c in zip(oracle.answers, oracle.calls, strict=True))
    assert examine(model, oracle).reason


@pytest.mark.jobs
def test_a_step_of_a_scan_reads_what_earlier_steps_changed() -> None:
    model, x = models.Suppress().eval(), torch.randn(5, 4)
    found = examined(model, x)
    assert found.rows["(model)"].status == "rewritten"
    chain = torch.tensor([[0.0], [0.4], [0.8], [1.2]]).expand(4, 4)  # each drops the next: the first and the third stay
    with torch.no_grad():
        assert torch.equal(patch_module(model, found.texts)(chain), model(chain))


@pytest.mark.jobs
def test_a_condition_that_no_probe_meets_is_not_taken_away() -> None:
    row = whole(models.Rare(), torch.randn(3, 4))
    assert row.rewrite is None or "x.max() > 1000000000.0" in row.rewrite.diff


def test_an_edit_that_answers_otherwise_is_not_taken_for_proven() -> None:
    model = models.BranchThenMore().eval()
    oracle = ask_original(model, calls_of(EagerSession(model, torch.randn(3, 4))))
    source = Path(models.__file__).read_text()
    wrong = source.replace("y = x * 2\n        else:\n            y = x - 1", "y = x * 2\n        y = torch.relu(x)")
    wrong = wrong.replace("if x.sum() > 0:  # value branch\n            y = x * 2", "y = x")
    assert wrong != source
    assert "differs" in examine(patch_module(model, {models.__file__: wrong}), oracle).reason


RECIPE = """
import torch
from torch import nn
from layers import Gate

def model():
    return nn.Sequential(nn.Linear(4, 4), Gate())

def loss(outputs, labels):
    return outputs.sum()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def dataset(mode):
    return torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8))

def examples():
    return torch.arange(12.0).reshape(3, 4) - 6
"""
LAYERS = """
import torch
from torch import nn


class Gate(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x - 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "layers.py").write_text(LAYERS)
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def test_a_recipe_is_healed_in_a_copy_and_progress_is_told_from_run_to_run(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healed = tmp_path / "healed"
    first = doctor(recipe, apply=healed, html=tmp_path / "doctor.html", onnx=False)
    assert (first.ready, first.healed, len(first.rows)) == (0, 2, 2)
    assert first.before is None
    assert (tmp_path / "layers.py").read_text() == LAYERS
    assert "torch.where" in (healed / "layers.py").read_text()
    assert (healed / "recipe.py").read_text() == RECIPE
    assert not list(healed.glob("*.doctor.json"))
    shown = (tmp_path / "doctor.html").read_text()
    assert "torch.where" in shown
    assert "layers.py:8" in shown
    monkeypatch.delitem(sys.modules, "layers")
    captured = capture(healed / "recipe.py", None, tmp_path / "b", formats=["torch_export"])
    assert [one.verdict for one in captured.programs] == ["proven"]  # static and rewritten parts in one program
    assert "where" in graph.text("torch_export", open_bundle(captured.path).program_path())

    recipe.with_name("layers.py").write_text((healed / "layers.py").read_text())
    recipe.write_text(RECIPE + "\n# healed\n")
    monkeypatch.delitem(sys.modules, "layers")  # the second run is another process
    second = doctor(recipe, onnx=False)
    assert second.progress == "2 of 2 submodules, was 0"


def test_the_copy_is_not_written_over_what_is_there(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        doctor(recipe, apply=tmp_path)


def test_a_dimension_of_an_input_that_is_not_there_is_refused(recipe: Path) -> None:
    with pytest.raises(CaptureError, match="declares 'y'"):
        doctor(recipe, dynamic={"y": [1]}, keep=False)


def test_the_command_line_says_it_as_json(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(recipe), "--no-onnx", "--json", "-q"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["healed"] == 2
    assert facts["rows"][1]["cause"]["words"] == "it branches on values: `if x.sum() > 0`"


def test_a_misspelt_dimension_is_one_clear_error(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(recipe), "--dynamic", "x"]) == 2
    assert "--dynamic 'x' is not INPUT:DIM" in capfd.readouterr().err


def test_a_torn_memory_of_the_last_run_counts_as_none(recipe: Path) -> None:
    from trueline.recipe.load import load_recipe

    recipe.with_suffix(".doctor.json").write_text("{torn")
    assert read_progress(load_recipe(recipe)) is None


def diagnosis(**changes: Any) -> Diagnosis:
    cause = Cause(kind="item", file="/a/model.py", line=7, source="n = <x>.item()", words="it takes a number out")
    rewrite = Rewrite(
        class_name="Net", file="/a/model.py", steps=("a & b",), diff="--- a\n+++ b\n-n\n+m <b>\n", probes=9,
        max_abs_error=0.0, onnx="proven",
    )  # fmt: skip
    row = Row(
        path="net", class_name="Net", status="rewritten", traceable=True, scriptable=False, exportable=False,
        cause=cause, rewrite=rewrite, why_not="",
    )  # fmt: skip
    return Diagnosis(**{"recipe": "r", "rows": (row,), "before": None, **changes})


def test_the_page_shows_code_as_text_and_loads_nothing_from_elsewhere() -> None:
    shown = page(diagnosis())
    assert "n = &lt;x&gt;.item()" in shown
    assert "+m &lt;b&gt;" in shown
    assert "<script" not in shown
    assert "http" not in shown


def test_the_report_counts_what_is_ready_and_what_the_rewrites_add() -> None:
    shown = text(diagnosis(before=0))
    assert shown.endswith("0 of 1 submodules, was 0, can be exported; 1 of 1 with the rewrites")
    assert "/a/model.py:7: n = <x>.item()" in shown
    assert "equal to the original on 9 calls" in shown
