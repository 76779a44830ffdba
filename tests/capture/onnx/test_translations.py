"""What torch.onnx lacks, or translates so that ONNX Runtime cannot run it or computes it less exactly, is proven."""

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
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import Proof, prove
from trueline.errors import CaptureError
from trueline.runtime.open import open_session
from worlds.cases import few

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def proven(module: nn.Module, *example: Tensor, free: dict[str, dict[int, str]] | None = None, folder: Path) -> Proof:
    eager = EagerSession(module.eval(), example, dynamic_shapes=free)
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, folder), exported.signature)
    return prove(session, eager, make_probes(eager.example, signature=exported.signature))


class Chosen(nn.Module):
    """A choice between booleans."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.where(x.sum(1, keepdim=True) > 0, x > 0.5, x < -0.5)


class Normed(nn.Module):
    """Of a constant image each channel is constant: its deviation is nothing but what the mean is off by."""

    def __init__(self, *, stored: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=stored)
        self.out = nn.Conv2d(8, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.conv(x)))
        return found


class Pairs(nn.Module):
    """Each with each: the one repeated in place, the other as a whole; how far they are apart; a running product."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = x.shape[1]
        pairs = torch.cat([x.repeat_interleave(n, dim=1), x.repeat(1, n, 1)], 2)
        return pairs, torch.cdist(x, x.flip(1), p=1.0), x.sigmoid().cumprod(1)


class Pooled(nn.Module):
    """To a size that divides neither side."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d((3, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.pool(x)
        return found


class Attended(nn.Module):
    """Scores with a bias for each distance, as T5 has them; what is attended to lies in memory head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Embedding(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, 4)
        q, k, v = (one.view(shape).transpose(1, 2) for one in self.given(x).chunk(3, -1))
        place = torch.arange(x.shape[1])
        bias = self.bias((place[:, None] - place[None, :]).abs().clamp(max=3)).permute(2, 0, 1).unsqueeze(0)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        answer: Tensor = self.out(found.transpose(1, 2).reshape(*x.shape[:2], -1))
        return answer


class Hidden(nn.Module):
    """A number minus integers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 - (x > 0).long())


class Turned(nn.Module):
    """By half of its length, and what is left of whole numbers and others when it is divided by it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = x.shape[1]
        return torch.roll(x, (n // 2, -1), (1, 2)), (x * 10).long() % n, x % (n + 1)


class Signed(nn.Module):
    """The sign of zeros too: the products with nothing are 0.0 and -0.0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.signbit(x.clamp(-1, 1) * 0.0)


class Middle(nn.Module):
    """What stands in the middle, and the second smallest."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        spread = (x - x.median(1, keepdim=True).values).abs().median(1).values
        return spread, x.flatten(1).kthvalue(2, -1).values, x.median()


class SumsOfHalves(nn.Module):
    """In half precision, of which some are outputs as they are."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        half = x.half()
        return half.sum(1), half.cumsum(1), half.sum() + half, x.sum(1), x.bfloat16().sum(1).float()


class Halves(nn.Module):
    """Parts of a length that is free: the last one is shorter where it is odd."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = x.chunk(2, 1)
        return first, second, second - first[:, : second.shape[1]]


class Doubles(nn.Module):
    """Numbers of the code beside doubles, some of which torch makes on a device."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.double()
        likeness = torch.cosine_similarity(wide, 0.1 * wide.square() + 1)
        return likeness, wide.index_fill(1, torch.tensor([0], device=x.device), 0.1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a choice between booleans": (Chosen, (3, 5)),
    "instance norm": (Normed, (2, 3, 31, 31)),
    "instance norm of what was stored": (lambda: Normed(stored=True), (2, 3, 31, 31)),
    "pairs": (Pairs, (3, 4, 2)),
    "adaptive pooling": (Pooled, (2, 3, 7, 5)),
    "attention with a bias": (Attended, (3, 5, 8)),
    "a number minus integers": (Hidden, (3, 5)),
    "divided by a size": (Turned, (3, 5, 4)),
    "the middle": (Middle, (3, 5, 4)),
    "signs of zeros": (Signed, (3, 5)),
    "halves of a length": (Halves, (3, 6, 4)),
    "sums in half precision": (SumsOfHalves, (3, 5)),
    "numbers beside doubles": (Doubles, (3, 5)),
}
FREE = {
    "attention with a bias": {"x": {1: "length"}},
    "pairs": {"x": {1: "points"}},
    "divided by a size": {"x": {1: "length"}},
    "the middle": {"x": {1: "length"}},
    "halves of a length": {"x": {1: "length"}},
    "adaptive pooling": {"x": {2: "height", 3: "width"}},
}


@pytest.mark.parametrize("case", few(CASES, 3, pytest.mark.jobs))
def test_it_answers_as_the_model_does(case: str, tmp_path: Path) -> None:
    build, shape = CASES[case]
    found = proven(build(), torch.randn(shape), free=FREE.get(case), folder=tmp_path)
    assert found.reason == ""
    assert sum(one.verdict == "agrees" for one in found.evidence) > 10


def test_an_input_may_be_called_as_the_exporter_calls_a_value_inside(tmp_path: Path) -> None:
    class Named(nn.Module):
        def forward(self, add: Tensor, mul: Tensor) -> dict[str, Tensor]:
            return {"relu": ((add + 1) * mul).relu(), "add_1": mul + 2}

    assert proven(Named(), torch.randn(3, 4), torch.randn(3, 4), folder=tmp_path).reason == ""


class ToTheFiner(nn.Module):
    """A feature pyramid's way up: the coarser map in the size of the finer."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        coarse = x[:, :, 1::3]
        return x + nn.functional.interpolate(coarse, size=x.shape[-1]), nn.functional.interpolate(x, scale_factor=1.7)


def test_the_nearest_element_is_the_same_at_every_size(tmp_path: Path) -> None:
    eager = EagerSession(ToTheFiner(), torch.randn(3, 2, 9), dynamic_shapes={"x": {2: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.claims[-1])
    for length in (*range(exported.claims[-1].dims["length"].min, 100), 141, 166, 500):
        x = {"x": np.arange(2 * length, dtype=np.float32).reshape(1, 2, length)}
        wanted, found = eager.run(x), session.run(x)
        assert all(np.array_equal(wanted[name], found[name]) for name in wanted), length


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_maximum_of_what_was_padded_with_zeros_sees_the_zeros(rank: int, tmp_path: Path) -> None:
    pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[rank - 1](3, stride=2)
    pad = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)[rank - 1](1, 0.0)
    x = -torch.rand(3, 2, *[5] * rank)  # below nought, so that a zero is the largest
    assert proven(nn.Sequential(pad, pool), x, folder=tmp_path).reason == ""


class Divided(nn.Module):
    """Floats that lie on the border of a whole quotient, and whole numbers that no float holds."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        x, y = a.float() / 3, b.float() * 0.7
        whole = [torch.div(a, b, rounding_mode=how) for how in ("floor", "trunc")]  # type: ignore[no-untyped-call]
        return (x // 0.7, x % 0.7, x // y, x % y, a // b, a % b, *whole, a * 0.1 // 0.1, x // 0.0)


def test_a_division_to_whole_numbers_is_the_same_to_the_last_one(tmp_path: Path) -> None:
    eager = EagerSession(Divided().eval(), (torch.arange(1, 7), torch.tensor([1, -2, 3, 4, -5, 7])))
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    near = np.arange(-300, 300)
    far = np.array([2**24 + 1, 10**9 + 7, -(10**12) - 1, -1], dtype=np.int64)
    for a in (near, far):
        inputs = {"a": a, "b": np.resize([1, -2, 3, 7, -8], a.shape)}
        for expected, found in zip(eager.run(inputs).values(), session.run(inputs).values(), strict=True):
            np.testing.assert_array_equal(expected, found)


class Inverts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x @ x.mT + torch.eye(3))


def test_an_operator_that_onnx_has_not_is_named_with_its_line() -> None:
    eager = EagerSession(Inverts().eval(), torch.randn(2, 3, 3))
    program = torch_export.export(eager.module, eager.calling).program
    with pytest.raises(CaptureError, match=r"ONNX has no operator for aten\.linalg_inv_ex") as refused:
        emit.translate(program, ["x"], ["y"])
    assert "torch.linalg.inv(x @ x.mT" in refused.value.hint
