"""Models in double precision: a number of the code is a double in ONNX, whatever operator it is beside."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow

WIDE = torch.float64
ULPS = 64
"""Units in the last place of a double that an answer may be off, of the largest number beside it."""

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda x: torch.full((5,), 0.1, dtype=WIDE) * x,
    "full_like": lambda x: torch.full_like(x, 0.1) * x,
    "new_full": lambda x: x.new_full((5,), 0.1) * x,
    "fill": lambda x: torch.empty_like(x).fill_(0.1) * x,
    "add": lambda x: torch.add(x, x.sin(), alpha=0.1),
    "sub": lambda x: torch.sub(x, x.sin(), alpha=0.1),
    "rsub": lambda x: torch.rsub(x, x.sin(), alpha=0.1),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.1),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 5, value=0.1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.1),
    "where": lambda x: torch.where(x > 0, x, 0.1),
    "clamp": lambda x: x.clamp(-0.1, 0.3),
    "rpow": lambda x: 0.3**x,
    "addmm": lambda x: torch.addmm(x[:, :3], x[:, :3], x[:3, :3], alpha=0.1, beta=0.3),
    "addmv": lambda x: torch.addmv(x[:, 0], x, x[0], alpha=0.1, beta=0.3),
    "addr": lambda x: torch.addr(x.new_ones(5, 5), x[0], x[1], alpha=0.1, beta=0.3),
    "addbmm": lambda x: torch.addbmm(x.new_ones(5, 5), x[:, :, None], x[:, None, :], alpha=0.1, beta=0.3),
    "baddbmm": lambda x: torch.baddbmm(x[:, :, None], x[:, :, None], x[:, None, :], alpha=0.1, beta=0.3),
    "product_beside_a_factor": lambda x: (x @ x.T) * 0.1 + (x * 0.3) @ x.T,
    "arange": lambda x: torch.arange(0, 0.5, 0.1, dtype=WIDE) * x,
    "linspace": lambda x: torch.linspace(0.1, 0.7, 5, dtype=WIDE) * x,
    "logspace": lambda x: torch.logspace(0.1, 0.7, 5, dtype=WIDE) * x,
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "sinc": torch.sinc,
    "log2": lambda x: torch.log2(x.abs() + 1),
    "log10": lambda x: torch.log10(x.abs() + 1),
    "norm": lambda x: x.norm(0.7, dim=1) + x.norm(3, dim=1),
    "cross_entropy": lambda x: F.cross_entropy(x, x.softmax(1), label_smoothing=0.1),
    "layer_norm": lambda x: F.layer_norm(x * 1e-4, (5,)),
    "layer_norm_by_hand": lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) * 1e-8 + 1e-5).sqrt(),
    "batch_norm": lambda x: F.batch_norm(x, x.new_zeros(5), x.new_full((5,), 1e-6)),
    "group_norm": lambda x: F.group_norm(x[:, :4] * 1e-4, 2),
    "instance_norm": lambda x: F.instance_norm(x[:, None] * 1e-4),
}
KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x, 0.1),
    "celu": lambda x: F.celu(x, 0.3),
    "selu": F.selu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1], dtype=WIDE)),
    "prelu_by_channel": lambda x: F.prelu(x, torch.linspace(0.1, 0.5, 5, dtype=WIDE)),
    "hardtanh": lambda x: F.hardtanh(x, -0.1, 0.3),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
    "softplus_with_numbers": lambda x: F.softplus(x, 0.3, 7.0),
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu_by_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "erf": torch.erf,
    "erfc": torch.erfc,
    "atan": torch.atan,
    "atan2": lambda x: torch.atan2(x, x.flip(1)),
    "asin": lambda x: (x / 100).asin(),
    "acos": lambda x: (x / 100).acos(),
    "tan": torch.tan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "acosh": lambda x: (x.abs() + 1).acosh(),
    "atanh": lambda x: (x / 100).atanh(),
    "bilinear": lambda x: F.interpolate(x[:, None, :, None].expand(-1, 1, 5, 4), size=(7, 9), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x[:, None, :, None].expand(-1, 1, 5, 4), size=(3, 9), mode="bicubic"),
}


class InDouble(nn.Module):
    def __init__(self, table: dict[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.table = list(table.items())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: function(x) for name, function in self.table}


Answers = list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the model and of ONNX Runtime, on small and large numbers."""
    eager = EagerSession(InDouble(NUMBERS | KERNELS).eval(), (torch.linspace(-3, 3, 15, dtype=WIDE).reshape(3, 5),))
    exported = torch_export.export(eager.module, eager.calling)
    folder: Path = tmp_path_factory.mktemp("doubles")
    session = open_session("onnx", emit.emit(exported, folder), exported.signature)
    found: Answers = []
    for seed, scale in enumerate((1, 10, 1e-3)):
        x = np.random.default_rng(seed).standard_normal((4, 5)) * scale
        found.append((dict(eager.run({"x": x})), session.run({"x": x})))
    return found


@pytest.mark.jobs
@pytest.mark.parametrize("name", [*NUMBERS, *KERNELS])
def test_an_operator_of_doubles_is_right_to_the_last_digits(name: str, answers: Answers) -> None:
    for expected, found in answers:
        scale = float(np.abs(expected[name]).max())
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=ULPS * np.finfo(np.float64).eps * scale)


BORDERS = np.array([0.0, -0.0, 1.0, -1.0, 0.46875, -4.0, 26.5, -30.5, math.inf, -math.inf, math.nan, 1e-300, -1e200])
FUNCTIONS = ("erf", "erfc", "atan", "sinh", "cosh", "asinh", "softplus", "gelu", "hardswish", "leaky_relu")


def test_formulas_are_right_at_their_borders(tmp_path: Path) -> None:
    chosen = {name: (NUMBERS | KERNELS)[name] for name in FUNCTIONS}
    eager = EagerSession(InDouble(chosen).eval(), (torch.ones(3, len(BORDERS), dtype=WIDE),))
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    x = np.tile(BORDERS, (2, 1))
    for name, expected in eager.run({"x": x}).items():
        found = session.run({"x": x})[name]
        np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-300, err_msg=name)
