"""What a model's own tensors decide is decided when it is traced; what an input comes into is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export.exported import Exported
from trueline.capture.export.torch_export import export
from trueline.capture.model.eager import EagerSession
from trueline.errors import CaptureError


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        for name, value in (
            ("ready", torch.tensor([True])),
            ("steps", torch.tensor(3)),
            ("t", torch.linspace(0, 1, 5)),
        ):
            self.register_buffer(name, value)

    ready: Tensor
    steps: Tensor
    t: Tensor


class Configured(Own):
    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            x = x * 0
        rises = self.t[1:] > self.t[:-1]
        assert rises.all() or (~rises).all()
        for _ in range(int(self.steps)):
            x = self.lin(x).tanh()
        return x - 1 if self.lin.weight.abs().max() > 100 else x


class Asked(Own):
    """The decision is of the buffer and of what it was added to."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.steps + x.sum() > 3 else self.lin(x)


class Written(Own):
    """A copy of the buffer is written into, through a view, before it decides."""

    def forward(self, x: Tensor) -> Tensor:
        times = self.t.clone()
        times[:1].add_(x.sum())
        return x if times[0] > 3 else self.lin(x)


class Drawn(Own):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand_like(self.t).sum() > 3 else self.lin(x)


def exported(module: nn.Module) -> Exported:
    eager = EagerSession(module.eval(), [torch.randn(3, 4)])
    return export(module, eager.calling)


def test_what_buffers_and_parameters_decide_is_decided() -> None:
    module = Configured()
    found = exported(module)
    for rows in (1, 2, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(found.program.module()(x)[0], module(x))
    held = {name.rpartition(".")[2] for name in found.program.state_dict}
    assert {"weight", "bias"} <= held  # a weight that decides is a parameter of the program all the same


@pytest.mark.parametrize("kind", [Asked, Written, Drawn])
def test_what_an_input_or_a_draw_comes_into_is_not(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="cannot follow the model"):
        exported(kind())
