"""Golden examples: every case and every output is asked again before a program answers anybody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trueline.bundle import Dim, Golden, Signature, TensorSpec
from trueline.errors import BundleError, NotProven, UsageError
from trueline.runtime import open as opening
from trueline.runtime.open import open_session, replay

X = TensorSpec(name="x", datatype="FP32", shape=("batch",))
OUT = tuple(TensorSpec(name=name, datatype="FP32", shape=("batch",)) for name in ("mean", "spread"))
SIGNATURE = Signature(inputs=(X,), outputs=OUT, dims={"batch": Dim()})


@dataclass
class Program:
    """What `answer` answers."""

    answer: Callable[[Any], Mapping[str, Any]]
    format = "onnx"
    signature = SIGNATURE

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self.answer(inputs["x"]))


class Kept:
    """A bundle, as far as its golden records go."""

    name = "small"
    signature = SIGNATURE

    def __init__(self, *sizes: int) -> None:
        given = [np.arange(size, dtype=np.float32) for size in sizes]
        self.cases = tuple(Golden(case=f"batch-{len(x)}", inputs={"x": x}, outputs=right(x)) for x in given)

    def golden(self) -> tuple[Golden, ...]:
        return self.cases


def right(x: Any) -> dict[str, Any]:
    return {"mean": x + np.float32(1), "spread": x * np.float32(2)}


def asked(bundle: Any, answer: Callable[[Any], Mapping[str, Any]]) -> list[str]:
    return list(replay(bundle, Program(answer)))


def test_a_program_that_answers_all_cases_is_let_through_whatever_the_order_of_its_outputs() -> None:
    assert asked(Kept(1, 2, 5), right) == ["batch-1", "batch-2", "batch-5"]
    assert asked(Kept(1, 2, 5), lambda x: dict(reversed(right(x).items()))) == ["batch-1", "batch-2", "batch-5"]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("output", ["mean", "spread"])
def test_one_case_and_one_output_that_is_wrong_is_named(size: int, output: str) -> None:
    def answer(x: Any) -> dict[str, Any]:
        found = right(x)
        if len(x) == size:
            found[output] = found[output] + np.float32(0.01)
        return found

    with pytest.raises(NotProven) as refused:
        asked(Kept(1, 2, 5), answer)
    assert f"fails golden record 'batch-{size}' here: output '{output}' differs by 0.01" in refused.value.message


def test_the_golden_tolerance_is_that_of_the_proof() -> None:
    assert asked(Kept(1), lambda x: {**right(x), "mean": right(x)["mean"] + np.float32(0.9e-4)}) == ["batch-1"]
    with pytest.raises(NotProven):
        asked(Kept(1), lambda x: {**right(x), "mean": right(x)["mean"] + np.float32(1.2e-4)})


@pytest.mark.parametrize(
    "change",
    [
        lambda found: {"mean": found["mean"]},
        lambda found: {"spread": found["spread"]},
        lambda found: {**found, "more": found["mean"]},
        lambda found: {},
        lambda found: {**found, "spread": found["spread"].astype(np.float64)},
        lambda found: {**found, "spread": found["spread"][None]},
        lambda found: {**found, "spread": found["spread"] * np.float32(np.nan)},
    ],
)
def test_an_output_that_is_missing_or_too_much_or_of_another_kind_is_refused(change: Any) -> None:
    with pytest.raises(NotProven, match="fails golden record 'batch-2'"):
        asked(Kept(2), lambda x: change(right(x)))


def test_a_bundle_without_a_golden_example_is_not_proven_here() -> None:
    with pytest.raises(NotProven, match="'small' has no golden record"):
        asked(Kept(), right)


def test_machine_code_is_opened_only_with_native_and_an_unknown_format_never(tmp_path: Path) -> None:
    (tmp_path / "model.so.pt2").write_bytes(b"machine code")
    with pytest.raises(UsageError, match="is machine code, and opening it runs it"):
        open_session("aotinductor", tmp_path / "model.so.pt2", SIGNATURE)
    with pytest.raises(UsageError, match="no runtime here runs format 'pickle'"):
        open_session("pickle", tmp_path / "model.so.pt2", SIGNATURE, native=True)
    with pytest.raises(BundleError, match="there is no program at"):
        open_session("onnx", tmp_path / "absent.onnx", SIGNATURE)


def test_a_program_is_opened_with_what_its_masks_have_to_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mask = TensorSpec(name="mask", datatype="INT64", shape=("batch", 2))
    plain = Signature(inputs=(mask,), outputs=(mask,), dims={"batch": Dim()})

    class Two(Kept):
        """A bundle of two programs, one of which was proven only for rows that show something."""

        signature = plain
        digest = "ab"

        def program(self, format: str | None = None) -> Any:
            return SimpleNamespace(format=format, fixed={})

        def program_path(self, format: str | None = None) -> Path:
            return tmp_path

        def signature_of(self, format: str | None = None) -> Signature:
            return plain.with_rows({"mask": "some"}) if format == "onnx" else plain

    monkeypatch.setattr(opening, "open_session", lambda format, path, signature, **_: (format, signature.rows))
    bundle: Any = Two(1)
    assert opening.open_program(bundle, "onnx") == ("onnx", {"mask": "some"})
    assert opening.open_program(bundle, "torch_export") == ("torch_export", {})
