"""A model that remembers is refused for every format, before any of them is tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trueline.capture import ladder
from trueline.capture.proof.determinism import Unsteady
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import Probe
from trueline.errors import CaptureError, NotProven

REMEMBERS = Unsteady(why="the model keeps a state", place=None, hint="make it a buffer")
NOTHING = CaptureError("it is not exported")


def seen(answer: float) -> Observation:
    x = np.ones((1, 2), np.float32)
    probe = Probe(name="p", origin="given", num_records=1, inputs={"x": x})
    return Observation(probe=probe, outputs={"y": x * np.float32(answer)}, error="", way=())


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats that were tried of a model that looks steady, is not exported, and answers as `observed` says."""
    formats: list[str] = []
    for room, name, answer in (
        (ladder.determinism, "check_twice", None),
        (ladder.determinism, "check_rare", None),
        (ladder.determinism, "check_order", None),
        (ladder.determinism, "find_cause", REMEMBERS),
    ):
        monkeypatch.setattr(room, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(ladder, "export_and_observe", lambda *_, **__: (NOTHING, (seen(1), seen(1))))

    def attempt(trial: ladder.FormatTrial, *_: Any) -> Any:
        formats.append(trial.format)
        return SimpleNamespace(attempt=SimpleNamespace(verdict="refused"), disagreeing=None)

    monkeypatch.setattr(ladder, "_try", attempt)
    return formats


def climb() -> Any:
    eager = SimpleNamespace(signature=SimpleNamespace(state={}))
    subject: Any = SimpleNamespace(num_bytes=0, eager=eager, random=False, module=None)
    return ladder.climb(subject, ["onnx", "torch_export"], Path())


def test_a_model_that_answers_alike_is_tried_in_every_format(tried: list[str]) -> None:
    assert len(climb()) == 2
    assert tried == ["onnx", "torch_export"]


def test_a_model_that_answers_equal_questions_differently_is_refused_for_all(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "export_and_observe", lambda *_, **__: (NOTHING, (seen(1), seen(2))))
    with pytest.raises(NotProven, match="the model keeps a state"):
        climb()
    assert tried == []


@pytest.mark.parametrize("look", ["check_twice", "check_order"])
def test_a_model_that_another_look_finds_out_is_refused_for_all(
    tried: list[str], monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    monkeypatch.setattr(ladder.determinism, look, lambda *_: REMEMBERS)
    with pytest.raises(NotProven, match="the model keeps a state") as refused:
        climb()
    assert (refused.value.hint, tried) == ("make it a buffer", [])


def test_a_model_that_does_something_only_once_is_refused_for_all(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder.determinism, "check_rare", lambda *_: REMEMBERS)
    with pytest.raises(NotProven):
        climb()
    assert tried == []


def test_random_answers_are_refused_unless_they_are_allowed_and_other_states_always(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = Unsteady(why="it draws", place=None, hint="", random=True)
    monkeypatch.setattr(ladder.determinism, "check_twice", lambda *_: draws)
    with pytest.raises(NotProven, match="it draws"):
        climb()
    eager = SimpleNamespace(signature=SimpleNamespace(state={}))
    allowed: Any = SimpleNamespace(num_bytes=0, eager=eager, random=True, module=None)
    ladder.climb(allowed, ["onnx"], Path())
    assert tried == ["onnx"]
    monkeypatch.setattr(ladder.determinism, "check_twice", lambda *_: REMEMBERS)
    with pytest.raises(NotProven, match="keeps a state"):
        ladder.climb(allowed, ["onnx"], Path())
    eager.signature.state = {"state.h": "next.h"}
    monkeypatch.setattr(ladder.determinism, "check_twice", lambda *_: draws)
    with pytest.raises(NotProven, match="and it keeps a state"):
        ladder.climb(allowed, ["onnx"], Path())


@pytest.mark.parametrize(
    ("wide", "narrow", "kept"),
    [
        ({"onnx": "refused", "torch_export": "proven"}, {"onnx": "refused", "torch_export": "proven"}, "wide"),
        ({"onnx": "refused", "torch_export": "proven"}, {"onnx": "proven", "torch_export": "proven"}, "narrow"),
        ({"onnx": "refused", "torch_export": "proven"}, {"onnx": "untried", "torch_export": "untried"}, "wide"),
        ({"onnx": "refused", "torch_export": "refused"}, {"onnx": "refused", "torch_export": "refused"}, "narrow"),
    ],
)
def test_a_program_that_a_narrower_claim_does_not_save_narrows_no_other(
    wide: dict[str, str], narrow: dict[str, str], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.erfc far out is refused in ONNX at every batch; a bag of embeddings beside it lost batch 1."""
    verdicts = {"wide": wide, "narrow": narrow}
    claims = {name: SimpleNamespace(signature=name) for name in verdicts}
    monkeypatch.setattr(ladder, "_narrow", lambda claim, *_: claims["narrow"] if claim.signature == "wide" else None)
    monkeypatch.setattr(ladder, "range_text", str)
    said: list[str] = []
    monkeypatch.setattr(ladder.events, "emit", lambda what, **_: said.append(what))

    def climb_all(claim: Any, formats: Sequence[str], _: int) -> list[Any]:
        of = verdicts[claim.signature]
        rungs = [SimpleNamespace(format=one, verdict=of.get(one, "refused")) for one in formats]
        return [SimpleNamespace(attempt=one, claim=claim.signature) for one in rungs]

    start: Any = claims["wide"]
    found: Any = ladder._climb_claims(start, (), climb_all, ["onnx", "torch_export"], ["torchscript"])
    assert {rung.claim for rung in found} == {kept}
    assert said == ["claim.tried", *["claim.kept"] * (kept == "wide")]
