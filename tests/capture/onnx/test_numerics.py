"""Order statistics, and formulas at their borders: translated to ONNX they are proven, and right for every number."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.capture.api import capture
from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove
from trueline.runtime.open import open_session
from worlds import recipes
from worlds.cases import few

pytestmark = pytest.mark.slow


class Of(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.function(x, y)


def places(x: Tensor, y: Tensor) -> Tensor:
    """Indices in a row of six."""
    return torch.remainder(y.nan_to_num(0.0, 0.0, 0.0).long(), 6)


def behind_nan(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """NaN before infinities and behind some, in rows with and without other numbers."""
    place = torch.arange(6)
    mixed = torch.where(place % 2 == 0, math.nan, math.inf)
    return (
        x * 0 + mixed,
        torch.where(place < 3, mixed, y),
        torch.where(place > 2, mixed, y),
        torch.where(y > 0, mixed, x),
    )


ORDERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "places of extremes": lambda x, y: (
        *(torch.log(x).argmax(1), torch.log(y).argmin(0, keepdim=True), torch.log(x).argmax(), y.argmin(keepdim=True)),
        *(x.round().nan_to_num().long().argmax(1), x.sum().argmax()),
    ),
    "extremes": lambda x, y: (x.amax(1), y.amin(), x.amin((0, 1), keepdim=True), y.round().nan_to_num().long().amax()),
    "kthvalue": lambda x, y: x.kthvalue(3, 1, keepdim=True).values,
    "median": lambda x, y: (x.median(1).values, torch.log(x).median(1).values, x.long().median(1).values),
    "median of all": lambda x, y: x * x.median(),
    "nanmedian": lambda x, y: torch.log(x).nanmedian(1, keepdim=True).values,
    "order statistics of infinity behind NaN": lambda x, y: (
        *(one.kthvalue(k, 1).values for one in behind_nan(x, y) for k in (1, 2, 5, 6)),
        *(one.median(1).values for one in behind_nan(x, y)),
        *(one.nanmedian(1).values for one in behind_nan(x, y)),
    ),
    "largest and smallest of infinity and NaN": lambda x, y: (
        *(one.topk(k, 1).values for one in behind_nan(x, y) for k in (1, 2, 5)),
        *(one.topk(k, 1, largest=False).values for one in behind_nan(x, y) for k in (1, 2, 5)),
        *(one.double().topk(2, 1).values for one in behind_nan(x, y)),
        *(x.long().topk(2, 1).values, x.topk(1, 0).values, behind_nan(x, y)[1].half().topk(3, 1).values),
    ),
    "mode": lambda x, y: x.round().mode(1).values,
    "running extremes": lambda x, y: (*x.cummax(1), *x.cummin(0), *(y > 0).cummax(1)),
    "order beside NaN": lambda x, y: (
        torch.where(x > 1, math.nan, y).sort(1, descending=True).values,
        torch.nanquantile(torch.where(x > 1, math.nan, y), 0.4, dim=1),
    ),
    "stable order": lambda x, y: (
        *torch.sort(x.round(), dim=1, stable=True),
        *torch.sort(y.round().nan_to_num().long(), dim=0, descending=True, stable=True),
        torch.argsort(x > 0, dim=1, stable=True),
    ),
    "elements under a mask": lambda x, y: (
        *(x.masked_select(y > 0), x[:, :1].masked_select(y > 0.5), y.masked_select((x > 0)[0])),
        x - x.masked_select(y > 0).mean(),
        *(x[x.sum(1) > 0].mean(0, keepdim=True), x[x > 0].median()),
    ),
    "runs of equal values": lambda x, y: (
        *torch.unique_consecutive(x.round(), return_inverse=True, return_counts=True),
        *torch.unique_consecutive(places(x, y)[:, :2] // 3, return_inverse=True, return_counts=True, dim=0),
    ),
    "largest of uneven parts": lambda x, y: F.adaptive_max_pool2d(x[None].round(), (2, 4), return_indices=True),
    "searchsorted": lambda x, y: (
        torch.searchsorted(x.nan_to_num().sort(1).values, y),
        torch.searchsorted(torch.tensor([-1.0, 0.0, 2.0]), y, right=True, out_int32=True),
    ),
}
NUMBERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "running sum of exponentials": lambda x, y: (torch.logcumsumexp(x, 1), torch.logcumsumexp(100 * y, 0)),
    "small constants": lambda x, y: (torch.log(x.relu() + 1e-12), x / (y.relu() + 1e-9), (x * 1.000004) ** 9 - x**9),
    "shares and sums in another dtype": lambda x, y: (
        *((x * 300).softmax(1, torch.float64), (y * 300).log_softmax(0, torch.float64)),
        *(x.sum(1, dtype=torch.float64), y.sum(dtype=torch.float64), x.mean(1, dtype=torch.float64)),
        *(one(x.half(), 1, dtype=torch.float32) for one in (torch.softmax, torch.log_softmax, torch.sum, torch.mean)),
        *(one((x.abs() + 1).tanh().mul(6e4).half(), 1, dtype=torch.float32) for one in (torch.sum, torch.mean)),
    ),
    "other names of arithmetic, of floats and whole numbers": lambda x, y: (
        *(torch.divide(x, places(x, y) + 1), torch.true_divide(places(x, y), places(x, y) + 1)),
        *(torch.multiply(places(x, y), x), torch.subtract(x, places(x, y)), torch.masked.var(x, 1)),
    ),
    "tensors of a list": lambda x, y: (torch.hstack((x[:, 0], y[:, 1])), *torch.atleast_2d(x[:, 2], y)),
    "running product": lambda x, y: torch.cumprod(
        (x.tanh() + 2) * torch.tensor([1e30, 1e30, 1e-30, 1e-30, 1.0, 2.0]), 1
    ),
    "signbit": lambda x, y: (torch.signbit(x), torch.signbit(y.round().long())),
    "copysign": torch.copysign,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "fmax and fmin": lambda x, y: (torch.fmax(torch.log(x), y), torch.fmin(y, torch.log(x))),
    "logaddexp": lambda x, y: torch.logaddexp(x * 300, y * 300),
    "logaddexp2": lambda x, y: (torch.logaddexp2(x * 300, y * 300), torch.logaddexp2(x * 1e-3 - 1, y * 1e-3 - 1)),
    "logaddexp of little and less": lambda x, y: (
        *(torch.logaddexp(x * 1e-3, y.abs() * -6), torch.logaddexp2(x * 1e-3, y.abs() * -6)),
        torch.logcumsumexp(torch.stack([x * 1e-4, y.abs() * -6]), 0),
    ),
    "logsigmoid": lambda x, y: F.logsigmoid(x * 300),
    "log1p": lambda x, y: (torch.log1p(x * 1e-6), torch.log1p(y * 1e30), torch.log1p(x)),
    "expm1": lambda x, y: (torch.expm1(x * 1e-6), torch.expm1(y * 300), torch.expm1(x)),
    "elu": lambda x, y: (F.elu(x * 1e-6), F.selu(y * 300), F.celu(x, 0.3)),
    "selu": lambda x, y: F.selu(x) + F.selu(y * 1e-6),
    "attention without heads": lambda x, y: (
        F.scaled_dot_product_attention(x[:, :, None], y[:, :, None], x[:, :, None], is_causal=True),
        F.scaled_dot_product_attention(x[:, :, None], y[:, :, None], y[:, :, None], (x > 0)[:, None], scale=0.3),
    ),
    "smoothed labels": lambda x, y: tuple(
        F.cross_entropy(
            x,
            y[:, 0].nan_to_num(0.0, 0.0, 0.0).abs().long() % 6,
            weight,
            ignore_index=each,
            reduction=by,
            label_smoothing=0.2,
        )
        for weight in (None, torch.arange(1.0, 7.0))
        for each in (-100, 1)
        for by in ("none", "mean", "sum")
    ),
    "smoothed images": lambda x, y: F.cross_entropy(
        x[:, :, None, None], places(x, y)[:, :1, None], label_smoothing=0.1
    ),
    "probabilities of classes": lambda x, y: tuple(
        F.cross_entropy(x, y.softmax(1), weight, reduction=by, label_smoothing=smoothing)
        for weight in (None, torch.arange(1.0, 7.0))
        for smoothing in (0.0, 0.3)
        for by in ("none", "mean", "sum")
    ),
    "roll by a size": lambda x, y: x.roll((x.shape[0] // 2, 2), (0, 1)) + x.roll(x.shape[0]),
    "scattered means": lambda x, y: (
        torch.zeros_like(x).scatter_reduce(1, places(x, y)[:, :4], y, "mean", include_self=False),
        x.scatter_reduce(1, places(x, y), y, "mean"),
    ),
}


@pytest.mark.parametrize("name", few([*ORDERS, *NUMBERS], 5, pytest.mark.jobs))
def test_an_operator_is_proven_in_onnx_and_right_at_its_borders(name: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    example = tuple(torch.from_numpy(random.standard_normal((3, 6)).astype(np.float32)) for _ in range(2))
    module = Of((ORDERS | NUMBERS)[name]).eval()
    eager = EagerSession(module, example)
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    assert prove(session, eager, make_probes(eager.example, signature=exported.signature)).reason == ""
    borders = np.array([0.0, -0.0, 1.0, -1.0, 2.0, -2.0], np.float32)
    for turn in range(6):
        given = [np.tile(one, (5, 1)) for one in (borders, np.roll(borders, turn))]
        found = session.run({spec.name: one for spec, one in zip(exported.signature.inputs, given, strict=True)})
        wanted = module(*map(torch.from_numpy, given))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for one, other in zip(found.values(), wanted, strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.jobs
def test_a_program_that_onnx_runtimes_sigmoid_spoils_is_emitted_with_the_formula(tmp_path: Path) -> None:
    """One whose sigmoid is an answer as it is has the formula at once: test_precision.py."""
    random = np.random.default_rng(0)
    example = tuple(torch.from_numpy(random.standard_normal((3, 6)).astype(np.float32)) for _ in range(2))
    recipe = recipes.untrained(
        lambda: Of(lambda x, y: F.linear(torch.sigmoid(y - 20), torch.eye(6))), examples=lambda: example
    )
    (onnx,) = capture(recipe, None, tmp_path / "b", formats=["onnx"]).programs
    assert "by their formula" in onnx.how
    assert onnx.range == "batch from 1 up, no bound"


class Attending(nn.Module):
    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        heads = x[:, None].expand(-1, 2, -1, -1)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=shown[:, None, None, :].bool())


def test_what_may_attend_to_nothing_is_zero_as_in_torch(tmp_path: Path) -> None:
    example = (torch.randn(2, 5, 4), torch.ones(2, 5, dtype=torch.int64))
    eager = EagerSession(Attending().eval(), example, dynamic_shapes={"x": {1: "length"}, "shown": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    assert prove(session, eager, make_probes(eager.example, signature=exported.signature)).reason == ""
    shown = np.array([[1, 0, 0], [0, 0, 0]], np.int64)
    found = session.run({"x": np.ones((2, 3, 4), np.float32), "shown": shown})
    (answer,) = found.values()
    assert (answer[0] == 1).all()
    assert (answer[1] == 0).all()
