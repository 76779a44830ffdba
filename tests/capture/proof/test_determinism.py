"""A model that is no function of its inputs is found out: by what it answers, and by what it keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Signature
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.explicit_state import Explicit
from trueline.capture.model.python_state import Recall
from trueline.capture.proof import determinism, stateful
from trueline.capture.proof.prove import Proof


class Dividing(nn.Module):
    """0 / 0 in one element of its own example."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x


class Keeping(nn.Module):
    """What it keeps in plain attributes, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(3)
        self.numbers = [torch.zeros(2)]
        self.table = {"a": torch.zeros(1)}
        self.count = 0

    def write(self) -> None:
        self.seen.add_(1)
        self.numbers[0].add_(1)
        self.table["a"].add_(1)
        self.count += 1

    def held(self) -> list[float]:
        return [float(self.seen[0]), float(self.numbers[0][0]), float(self.table["a"][0]), float(self.count)]


def test_a_model_that_answers_nan_to_its_own_example_is_found_out_before_anything_is_compared() -> None:
    example = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    found = determinism.check_twice(EagerSession(Dividing().eval(), example))
    assert found is not None
    assert "answers NaN to its own example, in 1 of 4 elements of 'output'" in found.why
    assert determinism.check_twice(EagerSession(Dividing().eval(), torch.ones(2, 2))) is None


def test_a_tensor_that_is_written_into_is_no_longer_what_it_was() -> None:
    module = Keeping()
    recall = Recall(module)
    assert recall.find_changed() == ()
    module.write()
    assert set(recall.find_changed()) == {"seen", "numbers", "table", "count"}


@pytest.mark.parametrize("name", ["seen", "numbers", "table", "count"])
def test_each_kind_of_attribute_is_looked_at(name: str) -> None:
    module = Keeping()
    recall = Recall(module)
    writes: dict[str, Any] = {
        "seen": lambda: module.seen.add_(2),
        "numbers": lambda: module.numbers.append(torch.zeros(1)),
        "table": lambda: module.table.update(b=torch.zeros(1)),
        "count": lambda: setattr(module, "count", 7),
    }
    writes[name]()
    assert recall.find_changed() == (name,)


def test_within_a_look_back_the_model_holds_what_it_held_and_afterwards_what_it_holds_now() -> None:
    module = Keeping()
    recall = Recall(module)
    module.write()
    for _ in range(2):  # what is written within is not there at the next look
        with recall.as_before():
            assert module.held() == [0.0, 0.0, 0.0, 0.0]
            module.write()
            assert module.held() == [1.0, 1.0, 1.0, 1.0]
        assert module.held() == [1.0, 1.0, 1.0, 1.0]


def evidence(verdict: Any, probe: str = "sequence 1, call 2") -> Evidence:
    return Evidence(format="onnx", against="eager", probe=probe, origin="given", inputs_sha256="0", shapes={},
                    verdict=verdict, reason="why")  # fmt: skip


@pytest.mark.parametrize(
    ("verdicts", "proven"),
    [(["agrees", "agrees"], True), (["agrees", "disagrees"], False), (["agrees", "outside"], False),
     (["agrees", "unanswered"], False), (["outside"], False)],
)  # fmt: skip
def test_a_sequence_is_proven_when_every_call_of_it_agrees(
    verdicts: list[str], proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stateful, "sequences", lambda *_: [])
    monkeypatch.setattr(stateful, "_judge", lambda *_: [evidence(verdict) for verdict in verdicts])
    alone = Proof(
        format="onnx",
        signature=Signature(inputs=(), outputs=(), dims={}),
        proven=True,
        reason="",
        disagreeing="",
        evidence=(evidence("agrees", "p"),),
        max_abs_error=0.0,
    )
    eager: Any = SimpleNamespace(module=Explicit.__new__(Explicit))
    found = stateful.prove_sequences(alone, None, eager)  # type: ignore[arg-type]
    assert (found.proven, found.reason == "") == (proven, proven)
    assert len(found.evidence) == 1 + len(verdicts)


class Attending(nn.Module):
    """Attention without dropout, and a count that changes the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # the cause
        return nn.functional.scaled_dot_product_attention(x, x, x) * self.calls


def test_an_operator_that_only_may_draw_is_not_blamed_for_what_a_state_does() -> None:
    found = determinism.check_twice(EagerSession(Attending().eval(), torch.randn(2, 3, 4, 8)))
    assert found is not None
    assert "keeps a state in the Python attributes it stores (calls)" in found.why
    assert found.place is not None
    assert "the cause" in found.place.source
