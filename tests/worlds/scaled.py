"""A model that multiplies by a number that follows from a length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.export.exported import Exported
from trueline.capture.model.eager import EagerSession


class Scaled(nn.Module):
    def __init__(self, function: Callable[[int], float]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * self.function(x.shape[1])


def exported(function: Callable[[int], float]) -> Exported:
    eager = EagerSession(Scaled(function).eval(), torch.ones(3, 9), dynamic_shapes={"x": {1: "length"}})
    return torch_export.export(eager.module, eager.calling)
