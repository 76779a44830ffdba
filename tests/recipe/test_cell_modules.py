"""A torch module of a notebook, such as a loss object, travels by its statement if that makes an equal one again."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from trueline.errors import RecipeError
from trueline.recipe import cells


def run(monkeypatch: pytest.MonkeyPatch, *written: str) -> dict[str, Any]:
    """The namespace of a notebook with these cells."""
    values: dict[str, Any] = {}
    for cell in written:
        exec(cell, values)
    monkeypatch.setattr(sys.modules["__main__"], "In", ["", *written], raising=False)
    return values


@pytest.mark.parametrize(
    "made",
    [
        "nn.CrossEntropyLoss()",
        "nn.CrossEntropyLoss(label_smoothing=SMOOTH)",
        "torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))",
        "nn.Sequential(nn.Flatten(), nn.Softmax(dim=1))",
    ],
)
def test_a_loss_object_of_a_cell_is_the_same_in_another_process(monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    values = run(monkeypatch, "import torch\nfrom torch import nn\nSMOOTH = 0.1", f"loss = {made}")
    there: dict[str, Any] = {}
    exec(cells.source_of(values, ["loss"]), there)
    outputs, labels = torch.tensor([[0.5, 0.25], [1.0, 3.0]]), torch.tensor([0, 1])
    given = (outputs,) if "Sequential" in made else (outputs, labels)
    assert torch.equal(there["loss"](*given), values["loss"](*given))


@pytest.mark.parametrize(
    "later",
    [
        "loss.label_smoothing = 0.5",
        "loss.weight = torch.tensor([1.0, 2.0])",
        "loss = nn.Linear(2, 2)",  # other weights each time
        "loss, other = nn.NLLLoss(), 1",
        "weights = torch.ones(2); loss = nn.CrossEntropyLoss(weight=weights)",
    ],
)
def test_a_module_that_its_cell_would_make_otherwise_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    values = run(monkeypatch, "import torch\nfrom torch import nn\nloss = nn.CrossEntropyLoss()", later)
    with pytest.raises(RecipeError, match=r"uses '(loss|weights)'"):
        cells.source_of(values, ["loss"])
