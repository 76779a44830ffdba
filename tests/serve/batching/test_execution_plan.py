"""What is tried before a version is ready, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from trueline.bundle import Bundle, Dim, Golden, Signature
from trueline.capture.export import fallbacks
from trueline.errors import BundleError, NotProven
from trueline.runtime.openvino import FixedSizesSession
from trueline.serve.batching import execution_plan as plan
from trueline.serve.batching.execution_plan import batch_symbol, draw_up, fit, row_dependence
from trueline.serve.models.loader import RuntimeOptions, load
from worlds import bundles
from worlds.bundles import spec
from worlds.servers import load_as_if


@dataclass
class Program:
    """A Session of one numpy function."""

    signature: Signature
    function: Callable[[Any], Any]
    format: str = "onnx"

    def run(self, inputs: Any) -> dict[str, Any]:
        self.signature.check(inputs)
        return {"y": self.function(inputs["x"])}


def rows_of(dim: Dim) -> Signature:
    return Signature(inputs=(spec("x", "batch", 2),), outputs=(spec("y", "batch", 2),), dims={"batch": dim})


def cases(rows: int = 4) -> list[Golden]:
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    return [Golden(case="g", inputs={"x": x}, outputs={"y": x})]


def test_rows_that_are_answered_alike_alone_and_in_company_may_share_a_run() -> None:
    program = Program(rows_of(Dim()), lambda x: x * 2)
    assert row_dependence(program, cases(), Dim()) == ""
    plan = draw_up(program, cases(), max_batch=64)
    assert plan.batch
    assert plan.max_batch == 64


def test_a_second_form_that_rounds_otherwise_is_timed_and_takes_no_batching_away() -> None:
    general, asked = Program(rows_of(Dim()), lambda x: x * 2), []

    def answer(x: Any) -> Any:
        asked.append(len(x))
        return x * 2 + np.float32(0.5)

    session = FixedSizesSession(general, lambda: general, {"batch": 1})
    session.admit(Program(rows_of(Dim()), answer))
    plan = draw_up(session, cases(), max_batch=64)
    assert plan.batch
    assert plan.cuts
    assert set(asked) == {1}  # by the measurement of a single record alone
    mixing = Program(rows_of(Dim()), lambda x: x / (1 + x.sum(axis=0, keepdims=True)))
    assert not draw_up(FixedSizesSession(mixing, lambda: mixing, {"batch": 1}), cases(), max_batch=64).batch


@pytest.mark.parametrize("rows", [1, 4])
def test_a_program_that_mixes_the_rows_of_its_batch_is_never_batched(rows: int) -> None:
    program = Program(rows_of(Dim()), lambda x: x / (1 + x.sum(axis=0, keepdims=True)))
    plan = draw_up(program, cases(rows), max_batch=64)
    assert not plan.batch
    assert "depends on the other rows" in plan.why


def scaled(x: Any) -> Any:
    """As a layer does whose activations are quantized while it runs, with one scale for all."""
    scale = np.abs(x).max() / 127
    return np.round(x / scale) * scale if np.abs(x).max() > 100 else x


@pytest.mark.parametrize(
    ("function", "company"),
    [
        (scaled, "one of them is large"),
        (lambda x: np.zeros_like(x) if np.isnan(x).any() else x, "NaN"),
        (lambda x: np.where(np.arange(len(x))[:, None] < 6, x, 0.0), "many are equal"),  # capacity of an expert
    ],
)
def test_a_program_that_only_bad_company_changes_is_never_batched(function: Any, company: str) -> None:
    plan = draw_up(Program(rows_of(Dim()), lambda x: function(x).astype(np.float32)), cases(), max_batch=64)
    assert not plan.batch
    assert company in plan.why


def test_a_program_that_refuses_what_a_neighbour_says_is_batched() -> None:
    def proud(x: Any) -> Any:
        if not np.isfinite(x).all():
            raise RuntimeError("no number")
        return x

    assert row_dependence(Program(rows_of(Dim()), proud), cases(), Dim()) == ""


def test_a_batch_stays_inside_the_proven_range() -> None:
    dim = Dim(min=2, max=6, multiple_of=2)
    plan = draw_up(Program(rows_of(dim), lambda x: x), cases(), max_batch=64)
    assert plan.max_batch == 6
    assert set(plan.latency_s) <= {2, 4, 6}
    assert plan.batch


def test_the_batch_is_a_symbol_that_leads_everything_and_stands_nowhere_else() -> None:
    def of(x: tuple[int | str, ...], y: tuple[int | str, ...]) -> str | None:
        return batch_symbol(Signature(inputs=(spec("x", *x),), outputs=(spec("y", *y),), dims={}))[0]

    assert of(("n", 2), ("n", 3)) == "n"
    assert of((4, 2), (4, 3)) is None
    assert of(("n", 2), (1,)) is None
    assert of(("n", 2), ()) is None
    assert of(("n", 2), ("m", 2)) is None
    assert of(("n", "n"), ("n",)) is None
    assert (fit(5, Dim(multiple_of=4)), fit(5, Dim(max=4))) == (8, None)


def test_a_short_program_runs_on_the_loop_and_says_so(tmp_path: Path) -> None:
    loaded = load_as_if(bundles.double_plus(tmp_path / "b"), 20e-6)
    assert loaded.plan.inline_values >= 3
    assert loaded.golden_cases == 1
    assert loaded.platform == "onnxruntime_onnx"


def test_one_run_that_something_else_held_up_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = iter([1e-5, 0.3])  # of a run that nobody looks at, and of the first one that is timed
    clock = [0.0]

    def held_up(x: Any) -> Any:
        clock[0] += next(took_s, 1e-5)
        return x

    program = Program(rows_of(Dim(max=1)), held_up)
    monkeypatch.setattr(plan.time, "perf_counter", lambda: clock[0])
    inputs = {"x": np.zeros((1, 2), np.float32)}
    assert plan.median_s(program, inputs) == pytest.approx(1e-5)
    slow = Program(rows_of(Dim(max=1)), lambda x: held_up(held_up(x)))
    took_s = iter([0.0, 0.0, 0.1, 0.1, 0.1, 0.1])
    assert plan.median_s(slow, inputs) == pytest.approx(0.2), "and slow ones are not asked nine times"


def test_a_wrong_golden_answer_is_not_proven_here(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="golden record '4'"):
        load(bundles.double_plus(tmp_path / "b", wrong=True), RuntimeOptions(), max_batch=64)


def test_a_bundle_other_than_the_registered_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="the registry names"):
        load(bundles.double_plus(tmp_path / "b"), RuntimeOptions(), max_batch=64, digest="0" * 64)


def test_a_program_that_takes_one_record_after_the_other_is_not_kept_waiting_for_company(tmp_path: Path) -> None:
    plain = bundles.double_plus(tmp_path / "plain")
    entry = msgspec.structs.replace(plain.program(), notes=fallbacks.BY_RECORDS)
    told = Bundle(path=plain.path, manifest=msgspec.structs.replace(plain.manifest, programs=(entry,)))
    alone, together = (load(bundle, RuntimeOptions(), max_batch=64).plan for bundle in (told, plain))
    assert together.batch
    assert not alone.batch
    assert "one record after the other" in alone.why


@pytest.mark.parametrize(("longest", "padded"), [(None, True), (8, True), (7, False)])
def test_sequences_are_filled_up_only_where_that_could_be_tried_here(longest: int | None, padded: bool) -> None:
    x, y = spec("x", "batch", "length"), spec("y", "batch", "length")
    dims = {"batch": Dim(), "length": Dim(max=longest)}
    program = Program(Signature(inputs=(x,), outputs=(y,), dims=dims, padded=("length",)), lambda x: x * 2)
    given = np.arange(8, dtype=np.float32).reshape(2, 4)
    golden = [Golden(case="g", inputs={"x": given}, outputs={"y": given * 2})]
    assert (plan.padding_of(program, golden) is not None) is padded
    program.function = lambda x: x * x.shape[1]  # the length shows in the answer
    assert plan.padding_of(program, golden) is None
