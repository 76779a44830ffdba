"""Whole numbers of every dtype: ONNX Runtime opens the program, and answers what torch answers, wrapped numbers too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.runtime.open import open_session
from worlds.cases import few

pytestmark = pytest.mark.slow

Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OPERATORS: dict[str, Operator] = {
    "a quotient by a number": lambda x, y: x // 3,
    "a quotient by values": lambda x, y: x // y,
    "a number by values": lambda x, y: 3 // y,
    "a quotient in place": lambda x, y: x.clone().floor_divide_(y),
    "limits": lambda x, y: x.clamp(1, 3),
    "a choice": lambda x, y: torch.where(x > y, x, y),
    "the largest": lambda x, y: torch.maximum(x, y).amax(1),
    "a square that wraps": lambda x, y: x**2 - y,
    "a product of matrices": lambda x, y: x @ y.T,
    "a half of a square": lambda x, y: x.tril().relu(),
    "the other sign": lambda x, y: -x,
    "a count beside a number": lambda x, y: x + (x > y),
}
DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Whole(torch.nn.Module):
    """The operator in each dtype."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [self.operator(x.to(dtype), y.to(dtype)) for dtype in DTYPES]


@pytest.mark.parametrize("what", few(OPERATORS, 2, pytest.mark.jobs))
def test_whole_numbers_of_every_dtype_are_answered_as_torch_answers(what: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = torch.tensor(random.integers(-100, 100, (3, 4)))
    y = torch.tensor(random.choice([-7, -3, -2, 1, 2, 5], (3, 4)))
    eager = EagerSession(Whole(OPERATORS[what]).eval(), (x, y))
    exported = torch_export.export(eager.module, eager.calling)
    program = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    inputs = {name: array[:2] for name, array in eager.example.items()}
    found = program.run(inputs)
    for name, expected in eager.run(inputs).items():
        np.testing.assert_array_equal(found[name], expected, strict=True)
