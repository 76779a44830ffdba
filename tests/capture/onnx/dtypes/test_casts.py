"""A rounding that the model makes is made in ONNX, too, and no other: to half precision, of numbers beside tensors, and
by each of several casts in a row."""

from __future__ import annotations

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


def under_autocast(x: Tensor, kind: torch.dtype) -> Tensor:
    with torch.autocast("cpu", kind):
        return F.linear(x, torch.linspace(-1, 1, 20).reshape(4, 5)).float()


def used_twice(x: Tensor) -> Tensor:
    """Rounded for the operator that takes it as for the one that widens it."""
    half = x.half() * 3
    return half.float() + half.exp().float()


def write_products(x: Tensor) -> Tensor:
    x[:, 1:] *= 3.3
    return x.div_(0.7)


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum_of_halves": lambda x: (x.half() + 1).float() - 1,
    "sum_of_bfloats": lambda x: (x.bfloat16() + 1).float() - 1,
    "what_a_cast_takes": lambda x: x - x.half().float(),
    "beyond_the_range": lambda x: (x.half() * 30000).float(),
    "chain_of_halves": lambda x: (x.half() * 3 + 1).exp().sin().float(),
    "moved_between": lambda x: (x.half() * 3)[:, [1, 0, 2]].mul(7).float(),
    "chosen": lambda x: torch.where(x > 0, x.half() * 3, x.half() / 3).float(),
    "limited": lambda x: (x.half().clamp(-1, 1) + 1).float(),
    "normalized": lambda x: x.half().softmax(1).float(),
    "added_at_places": lambda x: x.half().scatter_add(1, torch.tensor([[0], [1], [4]]), x[:, :1].half()).float(),
    "multiplied": lambda x: (x.half() @ x.half().T).float(),
    "an_output": lambda x: x.half() * 3 + 0.1,
    "used_twice": used_twice,
    "bfloats_by_autocast": lambda x: under_autocast(x, torch.bfloat16),
    "halves_by_autocast": lambda x: under_autocast(x, torch.float16),
    "whole_of_halves": lambda x: (x.half() / 3 * 7).long(),
    "doubles_and_back": lambda x: x.double() * 3 - (x.double() * 3).float(),
    "halves_of_doubles": lambda x: (x.double() / 3).half().double(),
    "wrapped": lambda x: (x * 1e9).long().int(),
    "wrapped_to_few_bits": lambda x: (x.double() * 1e9).long().to(torch.int16),
    "rounded_then_cut": lambda x: (x * 1e9).long().double().float().long(),
    "product_with_a_number": lambda x: (x.bfloat16() * 3.3 - 0.7 * x.bfloat16()).cumsum(1).float(),
    "product_of_halves_with_a_number": lambda x: (x.half() * 3.3 + 70000 * x.half().clamp(-0.1, 0.1)).float(),
    "product_in_place": lambda x: write_products(x.bfloat16()).float(),
    "quotient_by_a_number": lambda x: (x.bfloat16() / 3.3 + x.bfloat16() // 0.7).float(),
    "quotient_by_a_size": lambda x: (x.bfloat16().sum(1) / (x.shape[1] * 257) * (x.shape[1] * 0.37)).float(),
    "product_with_one_element": lambda x: (x.bfloat16() * x[0, 0] / torch.tensor([3001])).float(),
    "product_of_one_element": lambda x: (x[0, 0] * x.bfloat16()).float(),
    "sum_with_a_number": lambda x: ((x.bfloat16() + 0.1) - (3.3 - x.bfloat16())).float(),
    "sum_with_one_element": lambda x: (x.half() - x[0, 0]).float(),
    "power_and_rest": lambda x: (
        x.bfloat16().abs() ** 1.7 + x.bfloat16() % 0.7 + torch.fmod(x.bfloat16(), 0.3)
    ).float(),
    "compared_with_a_number": lambda x: (x.bfloat16() > 0.1) & (x.half() <= 0.7),
    "weighted": lambda x: torch.lerp(x.bfloat16(), x.bfloat16().flip(0), 0.3).float(),
    "product_added": lambda x: torch.addcmul(x.half(), x.half(), x.half().flip(0), value=0.1).float(),
    "quotient_added": lambda x: torch.addcdiv(x.half(), x.half(), x.half().abs() + 1, value=0.1).float(),
    "soft_with_a_number": lambda x: F.softplus(x.half(), 3.3, 1.1).float(),
    "scaled_by_a_power": lambda x: torch.ldexp(x.half(), torch.tensor(0.3)).float(),
    "scaled_batch": lambda x: (
        torch.baddbmm(x[None].half(), x[None, :, :1].half(), x[None, :1].half(), beta=1.1, alpha=3.3).squeeze(0).float()
    ),
    "a_branch": lambda x: torch.cond(
        x.sum() > 0, lambda x: (x.half() * 3).float(), lambda x: (x.half() / 3).float(), (x,)
    ),
}


class Rounding(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: function(x) for name, function in ROUNDED.items()}


Answers = list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the model and of ONNX Runtime, on small and large numbers."""
    eager = EagerSession(Rounding().eval(), (torch.linspace(-3, 3, 15).reshape(3, 5),))
    exported = torch_export.export(eager.module, eager.calling)
    folder: Path = tmp_path_factory.mktemp("rounding")
    session = open_session("onnx", emit.emit(exported, folder), exported.signature)
    found: Answers = []
    for seed, scale in enumerate((1, 3, 10, 1e-3)):
        x = (np.random.default_rng(seed).standard_normal((3, 5)) * scale).astype(np.float32)
        found.append((dict(eager.run({"x": x})), session.run({"x": x})))
    return found


@pytest.mark.jobs
@pytest.mark.parametrize("name", ROUNDED)
def test_it_is_rounded_to_the_same_bit(name: str, answers: Answers) -> None:
    for expected, found in answers:
        np.testing.assert_array_equal(found[name], expected[name])


def test_a_program_in_half_precision_computes_as_torch_does(tmp_path: Path) -> None:
    """Rounded once for each operator of torch, not for each of ONNX: `gelu` is several of these."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 3)).half()
    eager = EagerSession(body.eval(), torch.randn(3, 5).half())
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    (name,) = (spec.name for spec in exported.signature.inputs)
    given = {name: np.random.default_rng(0).standard_normal((200, 5)).astype(np.float16)}
    (expected,), (found,) = (one.run(given).values() for one in (eager, session))
    apart = np.abs(found.astype(np.float32) - expected.astype(np.float32))
    assert apart.max() <= 2 * np.finfo(np.float16).eps * np.abs(expected).max()
