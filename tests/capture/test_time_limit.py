"""A capture ends in its time, and what is proven by then is sealed."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trueline import events
from trueline.bundle import open_bundle
from trueline.bundle.describe import describe
from trueline.capture import ladder, time_limit
from trueline.capture.api import capture, capture_file
from trueline.capture.export import torch_export
from trueline.capture.model import code_paths
from trueline.capture.time_limit import OutOfTime, TimeLimit
from trueline.errors import CaptureError, NotProven, UsageError
from trueline.runtime.session import Format
from worlds.cases import few
from worlds.models import Mlp
from worlds.recipes import untrained

NOTHING = CaptureError("it is not exported")
MOMENT = 0.2 / 60
"""Minutes that end while the test looks."""


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "GRACE_S", 2.0)


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """An event that a stage waits for inside of an operator, where nothing interrupts it."""
    event = threading.Event()
    yield event
    event.set()


def spin(cleaned: list[str] | None = None) -> Any:
    """A loop that never ends."""
    try:
        while True:
            len("a")
    finally:
        if cleaned is not None:
            cleaned.append("cleaned up")


def recipe() -> Any:
    return untrained(Mlp, name="digits", examples=lambda: torch.randn(4, 8))


# ---- one stage


def test_a_stage_returns_what_it_returns_and_raises_what_it_raises() -> None:
    limit = TimeLimit(10)
    assert limit.run("a sum", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        limit.run("a quotient", lambda: 1 / 0)


def test_a_loop_that_never_ends_is_interrupted_and_cleans_up() -> None:
    cleaned: list[str] = []
    with pytest.raises(
        OutOfTime, match=r"the loop did not end in 0 s \(the limit is 0.00333 minutes in all\)"
    ) as raised:
        TimeLimit(MOMENT).run("the loop", lambda: spin(cleaned))
    assert cleaned == ["cleaned up"]
    assert "test_time_limit.py" in str(raised.value.place)
    assert raised.value.hint == "allow it more: --minutes 1"


def test_a_stage_that_swallows_every_error_is_out_of_time_too() -> None:
    def swallow() -> str:
        try:
            spin()
        except BaseException:  # noqa: BLE001 - as torch does in places
            raise RuntimeError("something else") from None
        return ""

    with pytest.raises(OutOfTime):
        TimeLimit(MOMENT).run("the loop", swallow)


def test_an_operator_that_does_not_return_is_left_behind(
    stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "GRACE_S", 0.05)
    limit = TimeLimit(MOMENT)
    with pytest.raises(OutOfTime, match="the operator did not end"):
        limit.run("the operator", stuck.wait)
    with pytest.raises(OutOfTime, match="not tried for want of time: the next"):
        limit.run("the next", lambda: pytest.fail("it began"))


def test_what_a_stage_that_is_left_behind_switched_on_is_put_back_and_no_other_begins(
    stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "GRACE_S", 0.05)
    limit, stderr = TimeLimit(10), sys.stderr

    def export() -> None:
        torch.compiler._is_exporting_flag = True
        with contextlib.redirect_stderr(io.StringIO()):
            stuck.wait()

    try:
        with pytest.raises(OutOfTime):
            limit.run("torch.export", export, share=1e-3)
        assert sys.stderr is stderr
        assert not torch.compiler.is_exporting()
        with pytest.raises(OutOfTime, match=r"the next, since torch\.export does not end"):
            limit.run("the next", lambda: pytest.fail("it began"))
    finally:
        torch.compiler._is_exporting_flag = False
    stuck.set()
    limit.wait_for_threads()
    assert limit.run("the next", lambda: "begins") == "begins"


def test_a_stage_gets_its_share_of_what_is_left() -> None:
    limit = TimeLimit(10)
    with pytest.raises(OutOfTime):
        limit.run("the loop", spin, share=1e-4)
    assert limit.run("the next", lambda: "has time") == "has time"


def test_an_interrupt_of_the_user_ends_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned: list[str] = []
    began = threading.Event()

    def interrupt(*_: object) -> None:
        began.wait()
        raise KeyboardInterrupt

    def work() -> None:
        try:
            began.set()
            spin()
        finally:
            cleaned.append("cleaned up")

    monkeypatch.setattr(time_limit, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        TimeLimit(10).run("the loop", work)
    assert cleaned == ["cleaned up"]


def test_a_long_stage_says_what_it_does_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "QUIET_S", 0.02)
    heard: list[dict[str, Any]] = []
    with events.listening(lambda name, fields: heard.append(fields)), pytest.raises(OutOfTime):
        TimeLimit(MOMENT).run("the loop", spin)
    assert heard[0]["what"] == "the loop"
    assert "test_time_limit.py" in heard[0]["at"]
    assert len(heard) <= 4  # twice as long each time


def test_a_stage_that_is_between_two_lines_is_in_its_function() -> None:
    code = test_a_stage_that_is_between_two_lines_is_in_its_function.__code__
    place = code_paths.line_at(SimpleNamespace(f_code=code, f_lineno=None))  # type: ignore[arg-type]
    assert place.source.startswith("def test_a_stage_that_is_between_two_lines")


@pytest.mark.parametrize("minutes", [0, -1, float("nan")])
def test_a_limit_is_above_zero(minutes: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="minutes is none"):
        capture(recipe(), None, tmp_path / "d.bundle", minutes=minutes)


def test_without_a_limit_a_large_model_has_more_time() -> None:
    limit = TimeLimit()
    assert limit.total == 30
    limit.allow_weights(400_000_000)
    assert limit.total == 38
    asked = TimeLimit(5)
    asked.allow_weights(400_000_000)
    assert asked.total == 5


# ---- a capture


@pytest.fixture
def endless_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_export, "export", lambda *_: spin())
    monkeypatch.setattr("trueline.capture.export_subject.EXPORT_SHARE", 1e-4)


@pytest.fixture
def endless_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX takes all that is left, and the clock then says so."""
    run = TimeLimit.run

    def cut(self: TimeLimit, what: str, stage: Any, *, share: float = 1.0) -> Any:
        return run(self, what, stage, share=1e-4 if "onnx" in what else share)

    monkeypatch.setattr(TimeLimit, "run", cut)
    monkeypatch.setitem(ladder.EMITTERS, "onnx", lambda *_: spin())


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.usefixtures("endless_export")
def test_where_the_export_does_not_end_torchscript_is_sealed(tmp_path: Path) -> None:
    captured = capture(recipe(), None, tmp_path / "d.bundle", minutes=20)
    assert [(one.format, one.verdict) for one in captured.programs] == [
        ("onnx", "untried"), ("torch_export", "untried"), ("torchscript", "proven"),
    ]  # fmt: skip
    assert "torch.export did not end" in captured.programs[0].summary
    assert "it was at" in captured.programs[0].summary
    shown = describe(open_bundle(tmp_path / "d.bundle"))
    assert "not tried for want of time: torch.export did not end" in shown
    assert os.listdir(tmp_path) == ["d.bundle"]


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.usefixtures("endless_onnx")
@pytest.mark.parametrize("formats", few([None, ["onnx", "torch_export"]], 1, pytest.mark.jobs))
def test_what_is_proven_is_sealed_where_another_format_does_not_end(
    formats: list[Format] | None, tmp_path: Path
) -> None:
    captured = capture(recipe(), None, tmp_path / "d.bundle", formats=formats, minutes=20)
    assert [(one.format, one.verdict) for one in captured.programs] == [
        ("onnx", "untried"), ("torch_export", "proven"),
    ]  # fmt: skip
    assert captured.serve == "torch_export"
    assert os.listdir(tmp_path) == ["d.bundle"]


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.usefixtures("endless_onnx")
def test_where_nothing_is_proven_the_error_names_the_limit(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="onnx program of 'digits' is not proven: not tried for want of time") as raised:
        capture(recipe(), None, tmp_path / "d.bundle", formats=["onnx"], minutes=20)
    assert raised.value.hint == "allow it more: --minutes 80"
    assert os.listdir(tmp_path) == []


def test_a_model_that_does_not_answer_is_out_of_time(tmp_path: Path) -> None:
    class Endless(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return spin()

    endless = untrained(Endless, name="endless", examples=lambda: torch.randn(4, 8))
    with pytest.raises(OutOfTime, match=r"the model with its example did not end .*; it was at .*time_limit\.py"):
        capture(endless, None, tmp_path / "d.bundle", minutes=MOMENT)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_file_is_captured_in_its_time_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = torch.export.export(Mlp().eval(), (torch.randn(4, 8),))
    torch.export.save(program, tmp_path / "mlp.pt2")
    run = TimeLimit.run

    def cut(self: TimeLimit, what: str, stage: Any, *, share: float = 1.0) -> Any:
        late = "onnx" in what
        return run(self, what, spin if late else stage, share=1e-4 if late else share)

    monkeypatch.setattr(TimeLimit, "run", cut)
    captured = capture_file(tmp_path / "mlp.pt2", tmp_path / "d.bundle", minutes=20)
    assert {one.format: one.verdict for one in captured.programs} == {"onnx": "untried", "torch_export": "proven"}


def test_the_narrower_claim_that_has_no_time_leaves_what_the_wider_one_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    def rung(verdict: str) -> Any:
        return SimpleNamespace(attempt=SimpleNamespace(verdict=verdict), disagreeing=None)

    rounds = [["refused", "proven"], ["untried", "untried"]]
    stricter = [SimpleNamespace(signature=None), None, None]
    monkeypatch.setattr(ladder, "_narrow", lambda *_: stricter.pop(0))
    monkeypatch.setattr(ladder, "range_text", lambda _: "")
    numbers: list[int] = []

    def climb_all(exported: Any, formats: Any, number: int) -> list[Any]:
        numbers.append(number)
        return [rung(verdict) for verdict in rounds[number][: len(formats)]]

    rungs = ladder._climb_claims(NOTHING, (), climb_all, ["onnx", "torch_export"], ())
    assert [one.attempt.verdict for one in rungs] == ["refused", "proven"]
    assert numbers == [0, 1, 1]
