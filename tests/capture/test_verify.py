"""`verify` asks every program golden records and fresh probes; where nothing was looked at, nothing holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline.bundle import Bundle, Contents, Dim, Golden, ProgramEntry, Signature, Summary, TensorSpec, seal
from trueline.capture import verify as room
from trueline.capture.verify import Verified, verify
from trueline.errors import UsageError

X = TensorSpec(name="x", datatype="FP32", shape=("batch", 2))
Y = TensorSpec(name="y", datatype="FP32", shape=("batch", 2))
SIGNATURE = Signature(inputs=(X,), outputs=(Y,), dims={"batch": Dim(min=1, max=6)})
FILES = {"onnx": "model.onnx", "torch_export": "model.pt2", "aotinductor": "model.so.pt2"}
Answer = Callable[[Any], Any]


def right(x: Any) -> Any:
    return x + np.float32(1)


@dataclass
class Program:
    """A program of `format`, and what it was asked."""

    format: str
    answer: Answer = right
    signature: Signature = SIGNATURE
    asked: list[Any] = field(default_factory=list)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.signature.check(inputs)
        self.asked.append(inputs["x"])
        return {"y": self.answer(inputs["x"])}


def bundle_of(folder: Path, *formats: str) -> Bundle:
    (folder / "work" / "programs").mkdir(parents=True)
    programs = []
    for format in formats:
        file = f"programs/{FILES[format]}"
        (folder / "work" / file).write_bytes(format.encode())
        entry = ProgramEntry(
            format=format, file=file, proven=True, seconds=0.0, probes=1, max_abs_error=0.0, versions={}
        )
        programs.append((entry, folder / "work"))
    given = [np.arange(2 * size, dtype=np.float32).reshape(size, 2) for size in (1, 2, 5)]
    made = Contents(
        name="small",
        signature=SIGNATURE,
        programs=programs,
        serve=formats[0],
        golden=[Golden(case=f"batch-{len(x)}", inputs={"x": x}, outputs={"y": right(x)}) for x in given],
        evidence=[],
        lineage={},
        summary=Summary(recipe="small", recipe_digest="ab"),
    )
    return seal(folder / "b", made)


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verified]:
    """Verifies a bundle of the programs that are handed in."""

    def act(*programs: Program, **options: Any) -> Verified:
        made = bundle_of(tmp_path, *(program.format for program in programs))
        by_format = {program.format: program for program in programs}

        def opened(bundle: Bundle, format: str | None = None, **_: Any) -> Program:
            return by_format[bundle.program(format).format]

        monkeypatch.setattr(room, "open_program", opened)
        return verify(made, **options)

    return act


def test_programs_that_agree_hold_with_how_much_was_asked_of_each(verified: Callable[..., Verified]) -> None:
    served, other = Program("onnx"), Program("torch_export")
    found = verified(served, other)
    assert found.holds
    assert [(one.format, one.holds, one.why, one.golden) for one in found.programs] == [
        ("onnx", True, "", 3),
        ("torch_export", True, "", 3),
    ]
    assert found.programs[0].probes == 0
    assert found.programs[1].probes == sum(one.verdict == "agrees" for one in found.programs[1].evidence) > 10
    assert "compared with each other only" in found.notes[0]


@pytest.mark.parametrize("case", [1, 2, 5])
@pytest.mark.parametrize("which", ["onnx", "torch_export"])
def test_a_program_that_fails_a_golden_example_does_not_hold_and_the_other_is_looked_at(
    verified: Callable[..., Verified], case: int, which: str
) -> None:
    def wrong(x: Any) -> Any:
        golden = np.arange(2 * case, dtype=np.float32).reshape(case, 2)
        return right(x) + np.float32(x.shape == golden.shape and (x == golden).all())

    programs = [Program(format, wrong if format == which else right) for format in ("onnx", "torch_export")]
    found = verified(*programs)
    by_format = {one.format: one for one in found.programs}
    assert not found.holds
    assert f"golden record 'batch-{case}'" in by_format[which].why
    assert not by_format[which].holds
    assert (by_format[which].golden, by_format[which].probes) == (0, 0)
    other = by_format[({"onnx", "torch_export"} - {which}).pop()]
    assert other.golden == 3


def test_a_program_that_answers_the_golden_examples_and_no_fresh_probe_does_not_hold(
    verified: Callable[..., Verified],
) -> None:
    found = verified(Program("onnx"), Program("torch_export", lambda x: right(np.abs(x))))
    assert [one.holds for one in found.programs] == [True, False]
    assert found.programs[1].why.startswith("on probe '")
    assert not found.holds


def test_both_ends_of_the_range_are_asked_and_nothing_beyond(verified: Callable[..., Verified]) -> None:
    other = Program("torch_export")
    found = verified(Program("onnx"), other)
    assert {1, 6} <= {len(x) for x in other.asked} <= set(range(1, 7))
    outside = [one for one in found.programs[1].evidence if one.verdict == "outside"]
    assert 7 in {one.shapes["x"][0] for one in outside}


def test_the_probes_are_fresh_ones_unless_those_of_the_capture_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bundle_of(tmp_path, "onnx", "torch_export")
    monkeypatch.setattr(room, "open_program", lambda bundle, format=None, **_: Program(bundle.program(format).format))

    def asked(**options: Any) -> set[str]:
        return {one.inputs_sha256 for one in verify(made, **options).programs[1].evidence}

    of_capture, fresh = asked(seed=0), asked()
    assert fresh - of_capture
    assert asked(seed=1) == fresh
    assert asked() == fresh


def test_without_torch_the_golden_records_are_replayed_and_a_note_says_what_was_not(
    verified: Callable[..., Verified], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = verified(Program("onnx"), Program("torch_export"))
    (verdict,) = found.programs
    assert (verdict.format, verdict.holds, verdict.golden, verdict.probes) == ("onnx", True, 3, 0)
    assert "the torch_export program was not checked: it needs torch" in found.notes
    assert any("pip install 'trueline[train]'" in note for note in found.notes)


def test_machine_code_is_looked_at_only_with_native_and_a_note_says_that_it_was_not(
    verified: Callable[..., Verified],
) -> None:
    native = Program("aotinductor")
    found = verified(Program("onnx"), native)
    assert ([one.format for one in found.programs], native.asked) == (["onnx"], [])
    assert any("the aotinductor program was not checked" in note for note in found.notes)


def test_machine_code_that_is_trusted_is_proven_like_the_others(verified: Callable[..., Verified]) -> None:
    found = verified(Program("onnx"), Program("aotinductor", lambda x: right(np.abs(x))), native=True)
    assert [(one.format, one.holds) for one in found.programs] == [("onnx", True), ("aotinductor", False)]


def test_machine_code_by_name_is_refused_without_trust(verified: Callable[..., Verified]) -> None:
    with pytest.raises(UsageError, match="is machine code, and proving it runs it"):
        verified(Program("onnx"), Program("aotinductor"), format="aotinductor")


def test_only_the_program_that_is_named_is_looked_at(verified: Callable[..., Verified]) -> None:
    found = verified(Program("onnx"), Program("torch_export", lambda x: x), format="onnx")
    assert ([one.format for one in found.programs], found.holds) == (["onnx"], True)


def test_what_looked_at_no_program_does_not_hold(verified: Callable[..., Verified]) -> None:
    found = verified(Program("onnx"))
    assert found.holds
    assert not dataclasses.replace(found, programs=()).holds


def test_a_program_of_which_no_probe_could_be_compared_does_not_hold(verified: Callable[..., Verified]) -> None:
    narrow = Signature(inputs=(X,), outputs=(Y,), dims={"batch": Dim(min=100)})

    class Elsewhere(Program):
        def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
            return {"y": right(inputs["x"])}

    found = verified(Program("onnx"), Elsewhere("torch_export", signature=narrow))
    assert not found.programs[1].holds
    assert "no probe could be compared" in found.programs[1].why
