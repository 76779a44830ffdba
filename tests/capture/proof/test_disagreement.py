"""A program that disagrees is refused with the first submodule whose output it does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch
from torch import Tensor, nn

from trueline.capture import ladder, sealing
from trueline.capture.api import capture
from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.capture.proof import disagreement
from trueline.errors import NotProven
from trueline.recipe.contract import Recipe
from worlds import marks, recipes

pytestmark = pytest.mark.slow  # exports programs


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Frozen(Part):  # defined here
    """Goes another way while it is exported than it goes when it is asked."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        return hidden if torch.compiler.is_exporting() else torch.relu(hidden)


class Chain(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = Part(), middle, Part()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.middle(self.first(x)))
        return found


class Own(Chain):
    """Its submodules are right, it is not."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x)
        return found if torch.compiler.is_exporting() else found + 1


class Memory(nn.Module):
    """An LSTM, of whose three outputs one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), Frozen()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(x[:, None, :])[0][:, 0])
        return found


def recipe(model: nn.Module) -> Recipe:
    return recipes.untrained(lambda: model, name="chain", examples=lambda: torch.randn(4, 8))


def oracle(model: nn.Module) -> EagerSession:
    torch.manual_seed(0)
    return EagerSession(model.eval(), torch.randn(4, 8))


def guilty(model: nn.Module) -> disagreement.Submodule | None:
    eager = oracle(model)
    exported = torch_export.export(eager.module, eager.calling)
    return disagreement.blame("torch_export", exported, eager, eager.example, Path())[1]


@pytest.mark.jobs
def test_the_refusal_names_the_frozen_submodule_its_class_and_where_that_is_defined(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(NotProven) as refused:
        capture(recipe(Chain(Frozen())), None, tmp_path / "b", formats=["torch_export"])
    assert "the first submodule whose output differs: 'middle' (Frozen) at " in refused.value.message
    assert marks.place_of(__file__, "defined here") in refused.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.jobs
def test_evidence_and_lineage_name_it_without_a_path_of_this_machine(tmp_path: Path) -> None:
    torch.manual_seed(0)
    subject = sealing.Subject(module=(model := Chain(Frozen()).eval()), eager=oracle(model), data={})
    (rung,) = ladder.climb(subject, ["torch_export"], tmp_path)
    assert rung.attempt.submodule == "'middle' (Frozen)"
    told = [one.reason for one in rung.evidence if one.probe == rung.disagreeing.name] if rung.disagreeing else []
    assert len(told) == 1
    assert told[0].endswith("first in submodule 'middle' (Frozen)")
    assert rung.attempt.as_record()["submodule"] == "'middle' (Frozen)"
    assert str(Path(__file__).parent) not in str(rung.attempt.as_record()) + told[0]


@pytest.mark.parametrize(
    ("model", "name"),
    [(Chain(Frozen()), "middle"), (Chain(Chain(Frozen())), "middle.middle"), (Own(Part()), ""), (Memory(), "head")],
)
def test_the_innermost_module_that_differs_is_named_and_the_model_itself_when_its_parts_agree(
    model: nn.Module, name: str
) -> None:
    found = guilty(model)
    assert found is not None
    assert found.name == name


def test_nobody_is_named_when_every_part_agrees() -> None:
    assert guilty(Chain(Part())) is None


@pytest.mark.slow
def test_a_fault_of_the_translation_to_onnx_is_told_from_one_of_the_export(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    eager = oracle(Chain(Part()))
    exported = torch_export.export(eager.module, eager.calling)
    assert disagreement.blame("onnx", exported, eager, eager.example, tmp_path)[1] is None
    translated = emit.translate

    def wrong(*given: Any) -> Any:
        """What a faulty translator would make: the activation in `middle` is another."""
        program = translated(*given)
        node = [node for node in program.model.graph if node.op_type == "Relu"][1]
        assert "module.middle" in onnx_ir.serde.serialize_node(node).SerializeToString().decode("latin1")
        node.op_type = "Sigmoid"
        return program

    monkeypatch.setattr(emit, "translate", wrong)
    stage, submodule = disagreement.blame("onnx", exported, eager, eager.example, tmp_path)
    assert submodule is not None
    assert submodule.name == "middle"
    assert "its translation to ONNX does not" in stage
    assert "not in OpenVINO" not in stage


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.round().topk(3, 1).indices


def test_the_order_of_equal_values_is_named_where_an_operator_leaves_it_open(tmp_path: Path) -> None:
    recipe = recipes.untrained(Largest, examples=lambda: torch.linspace(-2, 2, 24).reshape(3, 8))
    onnx, export = capture(recipe, None, tmp_path / "b").programs
    assert "torch.sort(x, dim, stable=True) has one that all have" in onnx.why
    assert export.verdict == "proven"


def test_what_is_compiled_from_a_right_export_is_blamed_on_the_compiler() -> None:
    eager = oracle(Chain(Part()))
    exported = torch_export.export(eager.module, eager.calling)
    stage, submodule = disagreement.blame("aotinductor", exported, eager, eager.example, Path())
    assert "what was compiled from it does not" in stage
    assert submodule is None


def test_calls_are_noted_in_the_order_in_which_they_end() -> None:
    eager = oracle(Chain(Part()))
    calls = disagreement.record_calls(eager, eager.example)
    assert [name for name, _ in calls] == [
        "first.linear",
        "first",
        "middle.linear",
        "middle",
        "last.linear",
        "last",
        "",
    ]
    assert all(isinstance(array, np.ndarray) for _, outputs in calls for array in outputs)
