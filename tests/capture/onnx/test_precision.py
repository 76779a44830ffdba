"""ONNX programs are as exact as torch where ONNX Runtime's own operators lose digits, and refuse what torch refuses."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit, indices
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow


def as_onnx(function: Callable[[Tensor], Sequence[Tensor]], shape: tuple[int, ...]) -> onnxruntime.InferenceSession:
    """`function` of one input, whose first two axes are free."""

    class Of(nn.Module):
        def forward(self, x: Tensor) -> Sequence[Tensor]:
            return tuple(function(x))

    free = torch.export.Dim.DYNAMIC
    example = torch.rand(shape)
    program = torch.export.export(Of(), (example,), dynamic_shapes=({0: free, 1: free},))
    names = [f"y{at}" for at in range(len(function(example)))]
    made = emit.translate(program, ["x"], names)
    return onnxruntime.InferenceSession(made.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])


def far_from(
    function: Callable[[Tensor], Sequence[Tensor]], session: onnxruntime.InferenceSession, x: Tensor
) -> list[float]:
    """The error of each output relative to its largest number, by float64."""
    wide = function(x.double())
    found = session.run(None, {"x": x.numpy()})
    return [
        float((torch.from_numpy(a).double() - w).abs().max() / w.abs().max()) for a, w in zip(found, wide, strict=True)
    ]


def test_the_smallest_whole_number_is_divided_by_minus_one_as_in_torch_and_ends_no_process() -> None:
    """ONNX Runtime ends the process with SIGFPE, so the program is asked in one of its own."""

    class Of(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Sequence[Tensor]:
            return a // b, a % b, torch.fmod(a, b), a.int() % b.int(), a % -1

    least = torch.iinfo(torch.int64).min
    pairs = torch.tensor([[least, -1], [least, 1], [least, 3], [7, -1], [-7, 2], [7, -2], [-7, -1], [-(2**31), -1]])
    given = {"a": pairs[:, 0].contiguous(), "b": pairs[:, 1].contiguous()}
    program = torch.export.export(Of(), tuple(given.values()))
    names = [f"y{at}" for at in range(5)]
    made = emit.translate(program, list(given), names).model_proto.SerializeToString()
    code = (
        "import sys, pickle, onnxruntime as o; m, x = pickle.load(sys.stdin.buffer); "
        "pickle.dump(o.InferenceSession(m).run(None, x), sys.stdout.buffer)"
    )
    asked = pickle.dumps((made, {name: one.numpy() for name, one in given.items()}))
    done = subprocess.run([sys.executable, "-c", code], input=asked, stdout=subprocess.PIPE)
    assert done.returncode == 0
    for found, wanted in zip(pickle.loads(done.stdout), Of()(*given.values()), strict=True):
        np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.jobs
def test_whole_numbers_that_double_cannot_hold_are_divided_exactly() -> None:
    def parts(x: Tensor) -> Sequence[Tensor]:
        numbers = x.round().to(torch.int64) * 2**40 + 1
        ninth = numbers // 9 + 5
        return numbers // -3, torch.fmod(numbers, 7), numbers % -5, numbers.int() // 9, torch.fmod(numbers, ninth)

    x = torch.tensor([[8191.0, -8191.0, 70001.0], [-70003.0, 12.0, -1.0]])
    for found, wanted in zip(as_onnx(parts, (2, 3)).run(None, {"x": x.numpy()}), parts(x), strict=True):
        np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.parametrize("size", [1e-30, 2e38])
def test_a_deviation_and_its_mean_are_exact_where_squares_and_sums_are_out_of_range(size: float) -> None:
    def both(x: Tensor) -> Sequence[Tensor]:
        return *torch.std_mean(x, 1), torch.var_mean(x * 1e-4, 1, keepdim=True)[1]

    x = torch.linspace(0.2, 1, 24).view(4, 6) * size
    assert max(far_from(both, as_onnx(both, (4, 6)), x)) < 1e-6


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_that_is_an_answer_is_exact_where_its_gates_close(bidirectional: bool, tmp_path: Path) -> None:
    class Layers(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = super().forward(x)[0]
            return found

    torch.manual_seed(0)
    layers = Layers(6, 5, num_layers=2, batch_first=True, bidirectional=bidirectional).eval()
    example = torch.randn(3, 5, 6)
    eager = EagerSession(layers, example, dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    path = emit.emit(exported, tmp_path)
    kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert (kinds["LSTM"], kinds["Scan"]) == (1, 1 + bidirectional)  # the first layer's tails end in a sum
    session = open_session("onnx", path, exported.signature)
    for record in (example[:1], example.abs()[:1, :3] * 30, -example.abs()[:1] * 30):
        given = {exported.signature.inputs[0].name: record.numpy()}
        for found, wanted in zip(session.run(given).values(), eager.run(given).values(), strict=True):
            assert (np.abs(found - wanted) <= 1e-4 * np.abs(wanted)).mean() > 0.9


def sums(x: Tensor) -> Sequence[Tensor]:
    spectrum = torch.fft.rfft(x, dim=1)
    norms = x.norm(dim=1), torch.linalg.vector_norm(x, 1, dim=1), F.adaptive_avg_pool1d(x.transpose(1, 2), 1)
    return *norms, x.mean(1), x.sum((0, 1)), x.cumsum(1), spectrum.real, spectrum.abs(), x / x.std(1, keepdim=True)


@cache
def sums_as_onnx() -> onnxruntime.InferenceSession:
    return as_onnx(sums, (2, 8, 4))


@pytest.mark.parametrize("length", [1000, 4096])
def test_rounding_does_not_grow_with_a_free_size(length: int) -> None:
    """Equal numbers round the same way at each addition; 1,000 is no power of two."""
    equal = torch.full((2, length, 4), 0.0129871) + torch.eye(4)[0] * torch.arange(length)[:, None] * 1e-3
    errors = far_from(sums, sums_as_onnx(), equal)
    assert max(errors[:8]) < 4e-7, errors


def halves(x: Tensor) -> Sequence[Tensor]:
    size = x.shape[1]
    shifted = torch.roll(x, (5 - size) // 2, 1) + x[:, (3 - size) // 2, None]
    return shifted, x.new_ones(-(-size // 8)), x[:, : (size - 20) // 3], F.pad(x, (0, 0, 0, -size % 8))


def test_a_size_below_zero_is_divided_as_in_python() -> None:
    session = as_onnx(halves, (2, 9, 2))
    for size in (8, 9, 10, 15, 16, 19, 22, 23, 40):
        x = torch.arange(size * 2.0).reshape(1, size, 2)
        for mine, torchs in zip(session.run(None, {"x": x.numpy()}), halves(x), strict=True):
            np.testing.assert_array_equal(mine, torchs.numpy(), f"{size}")


def extremes(x: Tensor) -> Sequence[Tensor]:
    return x.amax(1), x.amin((1, 2)), x.max(), x.min(2).values, torch.where(x.abs().amax(1) < 3, 1.0, 2.0)


def test_a_nan_at_any_place_is_the_largest_and_the_smallest_number_as_in_torch() -> None:
    session = as_onnx(extremes, (2, 8, 4))
    for place in range(24):
        x = torch.linspace(-1, 1, 24).reshape(1, 6, 4).clone()
        x.view(-1)[place] = torch.nan
        for mine, torchs in zip(session.run(None, {"x": x.numpy()}), extremes(x), strict=True):
            np.testing.assert_array_equal(mine, torchs.numpy())


def norms(x: Tensor) -> Sequence[Tensor]:
    groups = torch.stack([x, 2 * x + 1, x - 3, x * x], 1)
    scale, shift = torch.arange(1.0, 5.0).to(x), torch.arange(4.0).to(x)
    return F.instance_norm(groups), F.group_norm(groups, 2, scale, shift), F.layer_norm(x, x.shape[1:])


def test_a_norm_over_many_numbers_is_as_exact_as_that_over_few() -> None:
    session = as_onnx(norms, (3, 16))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 8, generator=generator).repeat_interleave(1 << 13, 1)
    for x in (rows, rows + 5, torch.randn(3, 7, generator=generator)):
        assert max(far_from(norms, session, x)) < 2e-6, x.shape


def test_a_norm_of_a_large_fixed_shape_is_exact_and_the_operator_stays_for_a_small_one() -> None:
    def of(size: int) -> onnx.ModelProto:
        program = torch.export.export(nn.LayerNorm([4, size]).eval(), (torch.rand(2, 4, size),))
        return emit.translate(program, ["x"], ["y"]).model_proto

    assert "LayerNormalization" in {node.op_type for node in of(64).graph.node}
    session = onnxruntime.InferenceSession(of(1 << 14).SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)).repeat_interleave(1 << 11, 2)
    assert max(far_from(lambda x: (F.layer_norm(x, x.shape[1:]),), session, x)) < 2e-6


def test_deviations_and_magnitudes_of_tiny_numbers_are_not_lost() -> None:
    tiny = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)) * 1e-30
    errors = far_from(sums, sums_as_onnx(), tiny)
    assert max(errors[3:]) < 1e-6, errors


def gates(x: Tensor) -> Sequence[Tensor]:
    return torch.sigmoid(x), F.glu(x, -1), F.silu(x)[:, :1] * 2, torch.sigmoid(x) + (x > 0).all()


def test_a_sigmoid_that_is_an_answer_keeps_its_small_numbers() -> None:
    session = as_onnx(gates, (2, 3, 4))
    x = torch.linspace(-80, -10, 24).reshape(2, 3, 4)
    found = session.run(None, {"x": x.numpy()})
    for at, (answer, exact) in enumerate(zip(found, gates(x.double()), strict=True)):
        relative = np.abs(answer - exact.numpy()) / np.abs(exact.numpy())
        assert relative.max() < 1e-5, at


TABLE = torch.arange(40.0)[:, None].repeat(1, 3)
LOOKUPS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda k: F.embedding(k, TABLE),
    "gather": lambda k: TABLE.t().gather(1, k[:, 0, None].expand(-1, 1)[:1]),
    "scatter": lambda k: torch.zeros(1, 40).scatter(1, k[:1, :1], 1.0),
    "scatter_src": lambda k: torch.zeros(1, 40).scatter(1, k[:1, :1], torch.ones(1, 1)),
    "scatter_add": lambda k: torch.zeros(1, 40).scatter_add(1, k[:1, :1], torch.ones(1, 1)),
    "index_select": lambda k: TABLE.index_select(0, k[0, :1]),
    "one_hot": lambda k: F.one_hot(k, 40),
    "scatter_amax": lambda k: torch.zeros(1, 40).scatter_reduce(1, k[:1, :1], torch.ones(1, 1), "amax"),
    "scatter_mean": lambda k: torch.zeros(1, 40).scatter_reduce(1, k[:1, :1], torch.ones(1, 1), "mean"),
    "index_add": lambda k: TABLE.index_add(0, k[0, :2], torch.ones(2, 3), alpha=2),
    "index_copy": lambda k: TABLE.index_copy(0, k[0, :1], torch.ones(1, 3)),
    "nll_loss": lambda k: F.nll_loss(TABLE.t()[:1], k[0, :1], reduction="none"),
    "cross_entropy": lambda k: F.cross_entropy(TABLE.t()[:1] / 9, k[0, :1], reduction="none"),
    "embedding_bag": lambda k: F.embedding_bag(k, TABLE, mode="sum"),
}


@pytest.mark.jobs
@pytest.mark.parametrize("name", LOOKUPS)
def test_a_computed_index_outside_of_a_table_is_refused_as_torch_refuses_it(name: str) -> None:
    def function(x: Tensor) -> Sequence[Tensor]:
        return [LOOKUPS[name]((x[:, :, 0] * 10).long())]

    session = as_onnx(function, (2, 3, 1))
    inside: npt.NDArray[np.float32] = np.full((2, 3, 1), 3.9, np.float32)
    np.testing.assert_allclose(session.run(None, {"x": inside})[0], function(torch.from_numpy(inside))[0], rtol=1e-6)
    for outside in (-0.1, -2.0, 4.0):
        x = inside.copy()
        x[0, 0] = outside
        with pytest.raises((IndexError, RuntimeError)):
            function(torch.from_numpy(x))
        with pytest.raises(Exception, match=r"(?i)indices|out of"):
            session.run(None, {"x": x})


@pytest.mark.jobs
@pytest.mark.parametrize("name", LOOKUPS)
def test_torch_onnx_still_answers_where_the_model_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The day that this fails for one, its translation can go."""
    others = {operator: made for operator, made in emit.TRANSLATIONS.items() if operator not in indices.TRANSLATIONS}
    monkeypatch.setattr(emit, "TRANSLATIONS", others)
    session = as_onnx(lambda x: [LOOKUPS[name]((x[:, :, 0] * 10).long())], (2, 3, 1))
    session.run(None, {"x": np.full((2, 3, 1), -0.1, np.float32)})
