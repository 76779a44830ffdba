"""Complex numbers are ONNX: each operator of a complex tensor answers as torch's, and layers of them are sealed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.capture.api import capture
from trueline.capture.export.tracing import quiet
from trueline.capture.onnx import emit
from trueline.capture.onnx.dtypes import complex_numbers
from worlds.cases import few
from worlds.recipes import untrained

pytestmark = pytest.mark.slow
_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims
X = torch.sin(torch.arange(24.0)).reshape(3, 8)
FIRST, MANY, SHOWN = torch.tensor([0, 2]), torch.tensor([[0, 3], [7, 1], [5, 5]]), torch.tensor([True, False, True])
LARGE = 1e30


def other(z: Tensor) -> Tensor:
    return z.flip(0) * (0.5 - 0.25j) + 0.1


def write(z: Tensor, at: Any, value: Any) -> Tensor:
    z = z * 1
    z[at] = value
    return z


CASES: dict[Any, Callable[[Tensor], Tensor]] = {
    _ATEN.angle.default: lambda z: write(z, (slice(None), 0), -1.0).angle(),
    _ATEN.exp.default: torch.exp,
    _ATEN.log.default: torch.log,
    _ATEN.sqrt.default: torch.sqrt,
    _ATEN.pow.Tensor_Scalar: lambda z: z**2 + z**3 + z**0.5 + z**1.5 + z**1,
    _ATEN.pow.Tensor_Tensor: lambda z: z ** torch.arange(8) + z**z,
    _ATEN.pow.Scalar: lambda z: 2**z,
    _ATEN.isfinite.default: lambda z: torch.isfinite(z / (z.real > 0)),
    _ATEN.isnan.default: lambda z: torch.isnan(z / (z.real > 0)),
    _ATEN.where.self: lambda z: torch.where(z.real > 0, z, other(z)),
    _ATEN.einsum.default: lambda z: torch.einsum("ab,cb,db->acd", z, z.conj(), other(z)),
    _ATEN.linear.default: lambda z: F.linear(z, other(z)[:2], z[:2, 0]),
    _ATEN.addmm.default: lambda z: torch.addmm(z[:, :3], z, other(z).T, beta=0.5, alpha=2j),
    _ATEN.gather.default: lambda z: z.gather(1, MANY),
    _ATEN.index.Tensor: lambda z: z[:, FIRST] + z[FIRST.clone(), FIRST].sum(),
    _ATEN.index_put.default: lambda z: write(z, (slice(None), FIRST), other(z)[:, :2]),
    _ATEN.select.int: lambda z: z[:, -1] * z[:, 1],
    _ATEN.index_select.default: lambda z: z.index_select(-1, FIRST),
    _ATEN.unsqueeze.default: lambda z: z.unsqueeze(-1) * z.unsqueeze(1),
    _ATEN.unbind.int: lambda z: z.unbind(-1)[2],
    _ATEN.cumsum.default: lambda z: z.cumsum(-1),
    _ATEN.expand.default: lambda z: z[None].expand(2, -1, -1) * 1,
    _ATEN.repeat.default: lambda z: z.repeat(2, 1, 3),
    _ATEN.zeros_like.default: lambda z: torch.zeros_like(z) + 1j,
    _ATEN.ones_like.default: lambda z: torch.ones_like(z) + 1j,
    _ATEN.full_like.default: lambda z: torch.full_like(z, 2 - 3j) * 2,
    _ATEN.new_zeros.default: lambda z: z.new_zeros(z.shape[0], 2) + z[:, :2],
    _ATEN.new_ones.default: lambda z: z.new_ones(z.shape[0], 2) + z[:, :2],
    _ATEN.new_full.default: lambda z: z.new_full((z.shape[0], 2), 1j) + z[:, :2],
    _ATEN.pad.default: lambda z: F.pad(z, (2, 1)) + F.pad(z[None], (1, 2), mode="circular")[0],
    _ATEN._to_copy.default: lambda z: z.to(torch.complex128) * 2,
    _PRIMS.convert_element_type.default: lambda z: z * torch.ones(8, dtype=torch.complex128),
    _ATEN.mul.Scalar: lambda z: z.real * 2j * other(z),
    _ATEN.div.Tensor: lambda z: z / 2j + (z * LARGE) / (other(z) * LARGE),
    _ATEN.eq.Tensor: lambda z: (z == z.flip(0)) | (z == z[0, 0]),
    _ATEN.ne.Tensor: lambda z: (z != z.flip(0)) & (z != 0),
    _ATEN.mm.default: lambda z: torch.mm(z, other(z).T),
    _ATEN.bmm.default: lambda z: torch.bmm(z[None], other(z).T[None]),
    _ATEN.mv.default: lambda z: torch.mv(z, other(z)[0]),
    _ATEN.dot.default: lambda z: torch.dot(z[0], z[1]),
    _ATEN.masked_fill.Scalar: lambda z: z.masked_fill(z.real > 0, 1 - 2j),
    _ATEN.split.Tensor: lambda z: z.split(3, -1)[2] * z.split([1, 2, 5], 1)[1],
    _ATEN.slice_scatter.default: lambda z: write(z, (slice(None), slice(1, 4)), other(z)[:, :3]),
    _ATEN.select_scatter.default: lambda z: z.select_scatter(z[:, 1], -1, 3),
    _ATEN.copy.default: lambda z: write(z, (slice(None), 2), z[:, 0]),
    _ATEN.fill.Tensor: lambda z: write(z, (slice(None), 2), 3j),
    _ATEN.sym_size.int: lambda z: z[SHOWN],
    _ATEN.alias.default: lambda z: z.unsqueeze(-1)[:, :].transpose(1, 2) * z[:, None],
    _ATEN.detach.default: lambda z: z.detach() * 1,
}
"""Operator -> a function of a complex tensor [3, 8] that needs it."""


class OfPairs(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(torch.complex(x, x.flip(1) * 0.7))
        return torch.view_as_real(found) if found.is_complex() else found


def is_right(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether ONNX Runtime answers as torch."""
    with torch.no_grad(), quiet():
        program = torch.export.export(OfPairs(function), (X,), strict=False)
        try:
            made = emit.translate(program, ["x"], ["y"])
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            session = onnxruntime.InferenceSession(
                made.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            (found,) = session.run(None, {"x": X.numpy()})
        except Exception:  # noqa: BLE001 - what it cannot write or run it does not answer
            return False
        expected = OfPairs(function)(X).numpy()
    same = found.dtype == expected.dtype and found.shape == expected.shape
    return same and np.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("operator", few(CASES, 6), ids=str)
def test_an_operator_of_complex_numbers_answers_as_torch(operator: Any) -> None:
    assert is_right(CASES[operator])


@pytest.mark.jobs
@pytest.mark.parametrize("operator", few(CASES, 3), ids=str)
def test_the_exporter_has_no_right_translation(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complex_numbers, "OF_PAIRS", {})
    assert not is_right(CASES[operator]), f"{operator} is no longer needed: delete it"


class SpectralLayer(nn.Module):
    """Of a Fourier neural operator: the lowest frequencies times complex weights, and a way past them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 3, dtype=torch.cfloat))
        self.past = nn.Conv1d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(x)
        out = torch.zeros(len(x), 4, x.shape[-1] // 2 + 1, dtype=torch.cfloat)
        out[:, :, :3] = torch.einsum("bix,iox->box", found[:, :, :3], self.weight)
        return torch.fft.irfft(out, n=x.shape[-1]) + self.past(x)


class StateSpace(nn.Module):
    """S4D: a kernel of powers of complex numbers, as long as the signal, in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Parameter(torch.randn(3, 4, 2))
        self.decay, self.turn = nn.Parameter(torch.rand(3, 4)), nn.Parameter(3 * torch.rand(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        length, rates = x.shape[-1], 0.1 * (1j * self.turn - torch.exp(self.decay))
        powers = torch.exp(rates[..., None] * torch.arange(length))
        kernel = 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.out) * (torch.exp(rates) - 1), powers).real
        product = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return torch.fft.irfft(product, n=2 * length)[..., :length]


class Rotary(nn.Module):
    """Positions that are given, looked up in a table of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        turns = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("table", torch.polar(torch.ones_like(turns), turns))
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        at = x[:, :, 0].abs().long().clamp(max=15)
        found = torch.view_as_complex(x.reshape(*x.shape[:2], 2, 2)) * self.table[at]
        return torch.view_as_real(found).flatten(2)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("kind", "shape"), few([(SpectralLayer, (2, 3, 12)), (StateSpace, (2, 3, 12)), (Rotary, (2, 5, 4))], 1)
)
def test_a_layer_of_complex_numbers_is_sealed_as_onnx(
    kind: type[nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    done = capture(untrained(kind, examples=lambda: torch.randn(shape)), None, tmp_path / "b")
    assert {one.format for one in done.programs if one.verdict == "proven"} >= {"onnx", "torch_export"}
