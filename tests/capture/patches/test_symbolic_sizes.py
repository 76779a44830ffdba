"""What torch fixes of a size, or bounds, stays free, and answers what torch's own does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.export.tracing import tracing
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.capture.patches import symbolic_sizes
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove
from trueline.runtime.open import open_session


class Turned(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Linear(2, 6)
        self.where.weight.data.mul_(0.1)
        self.where.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.where(x.mean((2, 3))).view(-1, 2, 3)
        grid = nn.functional.affine_grid(theta, list(x.shape), align_corners=False)
        return nn.functional.grid_sample(x, grid, align_corners=False)


class Near(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.codes)


class Ramp(nn.Module):
    """Where each element stands, from one end to the other."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (torch.linspace(-1, 1, size) for size in x.shape[2:])
        return x * rows[:, None] + columns


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid")
@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("size", [(2, 3, 5, 7), (1, 1, 1, 4), (2, 1, 3, 4, 5)])
def test_a_grid_is_torchs_own(size: tuple[int, ...], corners: bool) -> None:
    axes = len(size) - 2
    theta = torch.randn(size[0], axes, axes + 1)
    expected = nn.functional.affine_grid(theta, list(size), align_corners=corners)
    assert torch.equal(symbolic_sizes.affine_grid(theta, size, corners), expected)  # a pixel may be nearest by a digit


@pytest.mark.parametrize("rows", [3, 40])
def test_a_distance_is_torchs_own_on_both_sides_of_26_rows(rows: int) -> None:
    a, b = torch.randn(2, rows, 4), torch.randn(2, 5, 4)
    assert torch.equal(symbolic_sizes.cdist(a, b), torch.cdist(a, b))
    assert torch.equal(symbolic_sizes.cdist(a, b, p=1.0), torch.cdist(a, b, p=1.0))


@pytest.mark.parametrize("steps", [1, 2, 5, 100])
@pytest.mark.parametrize("ends", [(0, 1), (-1.0, 1.0), (3.0, -0.5)])
def test_equal_steps_are_torchs_own(steps: int, ends: tuple[float, float]) -> None:
    torch.testing.assert_close(symbolic_sizes.space_evenly(*ends, steps, torch.float32), torch.linspace(*ends, steps))


@pytest.mark.parametrize("ends", [(0.0, 1.0), (-1, 1), (0.1, 7.3), (1e-3, 1e4)])
def test_equal_steps_have_the_bits_of_torchs(ends: tuple[float, float]) -> None:
    """As a row of a table, `(torch.linspace(0, 1, 15) * 8).long()` was another one in three places."""
    for steps in (*range(1, 200), 1000, 4097):
        assert torch.equal(symbolic_sizes.space_evenly(*ends, steps, torch.float32), torch.linspace(*ends, steps))


class ByName(nn.Module):
    """Lengths that torch's functions get by name."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        half = torch.fft.rfftfreq(n=n).sum() + torch.bartlett_window(window_length=n).mean()
        change = torch.gradient(input=x, dim=1)[0]
        return x * torch.hann_window(window_length=n, periodic=False) + half + change


def test_functions_of_torch_take_their_arguments_by_name() -> None:
    x = torch.randn(3, 9)
    eager = EagerSession(ByName().eval(), x, dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    assert exported.signature.dims["length"].max is None
    for length in (5, 30):
        longer = torch.randn(2, length)
        torch.testing.assert_close(exported.program.module()(longer)[0], ByName()(longer))


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "x", "free"),
    [
        (Turned(), torch.randn(2, 2, 5, 6), {2: "h", 3: "w"}),
        (Ramp(), torch.randn(2, 2, 5, 6), {2: "h", 3: "w"}),
        (Near(), torch.randn(7, 4), {}),
    ],
)
def test_sizes_are_free_without_a_bound_in_every_format(
    model: nn.Module, x: Tensor, free: dict[int, str], tmp_path: Path
) -> None:
    model = model.eval()
    eager = EagerSession(model, x, dynamic_shapes={"x": free})
    exported = torch_export.export(model, eager.calling)
    assert all(dim.max is None for dim in exported.signature.dims.values())
    probes = make_probes(eager.example, signature=exported.signature, sizes=exported.boundaries)
    assert any(max(probe.inputs["x"].shape) > 25 for probe in probes)
    for format, emit in (("onnx", onnx_emit.emit), ("torch_export", torch_export.emit)):
        session = open_session(format, emit(exported, tmp_path / format), exported.signature)  # type: ignore[arg-type]
        proof = prove(session, eager, probes)
        assert proof.proven, proof.reason


def test_torchs_own_functions_are_back_after_tracing() -> None:
    before = torch.cdist, torch.affine_grid_generator, torch.linspace
    with symbolic_sizes.keep_sizes_free():
        assert torch.cdist is symbolic_sizes.cdist
    assert (torch.cdist, torch.affine_grid_generator, torch.linspace) == before


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 501])
@pytest.mark.parametrize("less", [0, 1, 3])
def test_indices_of_triangles_are_torchs_own(size: int, less: int) -> None:
    lower, upper = symbolic_sizes.lower_indices(size, less), symbolic_sizes.upper_indices(size, less)
    assert torch.equal(torch.stack(lower), torch.tril_indices(size, size, -less))
    assert torch.equal(torch.stack(upper), torch.triu_indices(size, size, less))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("periodic", [True, False])
def test_a_triangular_window_is_torchs_own(size: int, periodic: bool) -> None:
    torch.testing.assert_close(symbolic_sizes.triangle(size, periodic), torch.bartlett_window(size, periodic))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("beta", [0.5, 12.0])
def test_a_kaiser_window_is_torchs_own(size: int, periodic: bool, beta: float) -> None:
    found = symbolic_sizes.kaiser(size, periodic, beta)
    torch.testing.assert_close(found, torch.kaiser_window(size, periodic, beta), rtol=1e-5, atol=1e-7)


def test_a_kaiser_window_of_float64_is_exact() -> None:
    found = symbolic_sizes.kaiser(33, dtype=torch.float64)
    torch.testing.assert_close(found, torch.kaiser_window(33, dtype=torch.float64), rtol=1e-13, atol=1e-16)


def test_covariances_are_torchs_own() -> None:
    x = torch.randn(3, 9)
    torch.testing.assert_close(symbolic_sizes.covariance(x), torch.cov(x))
    torch.testing.assert_close(symbolic_sizes.covariance(x[0], correction=0), torch.cov(x[0], correction=0))
    torch.testing.assert_close(symbolic_sizes.correlation(x), torch.corrcoef(x))
    torch.testing.assert_close(symbolic_sizes.correlation(x[0]), torch.corrcoef(x[0]))


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool1d": lambda x: nn.functional.max_pool1d(x, 3, 2, 1, ceil_mode=True),
    "MaxPool1d": nn.MaxPool1d(2),
    "max_pool1d over all": lambda x: nn.functional.max_pool1d(x.where(x < 2, torch.nan), x.size(2)).isnan(),
    "MaxPool1d over all": lambda x: nn.MaxPool1d(x.size(2), stride=1)(x),
    "max_pool2d over all": lambda x: nn.functional.max_pool2d(x[:, None], kernel_size=x.size()[1:], ceil_mode=True),
    "max_pool2d over all of one dimension": lambda x: nn.functional.max_pool2d(x[:, None], (1, x.shape[2])),
    "avg_pool1d over all": lambda x: nn.functional.avg_pool1d(x, x.shape[-1]),
    "avg_pool2d over all": lambda x: nn.functional.avg_pool2d(x.abs().pow(3), (x.size(-2), x.size(-1))).pow(1 / 3),
    "avg_pool3d over all": lambda x: nn.AvgPool3d(x.shape)(x[None, None]),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(2)[:, :1], 2),
    "method take_along_dim": lambda x: x.take_along_dim(torch.tensor([[[-1, 0, 5]]]), 2),
    "new_tensor": lambda x: (
        x * x.new_tensor(x.shape[2]) / x.new_tensor([x.shape[2], 2]).sum() + x.new_tensor([1, 0.5])[1]
    ),
    "new_tensor of another dtype": lambda x: x[..., x.new_tensor((x.shape[2] - 1, 0), dtype=torch.long)],
    "kron": lambda x: torch.kron(x[0], torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
    "hann": lambda x: x * torch.hann_window(x.shape[2]),
    "hamming": lambda x: x * torch.hamming_window(x.shape[2], periodic=False),
    "blackman": lambda x: x * torch.blackman_window(x.shape[2]),
    "bartlett": lambda x: x * torch.bartlett_window(x.shape[2]),
    "kaiser": lambda x: x * torch.kaiser_window(x.shape[2], False, 8.0),
    "powers": lambda x: x @ torch.vander(torch.linspace(-1, 1, x.shape[2]), 4),
    "a ramp that ends at a size": lambda x: x + torch.linspace(0.5, x.shape[2] - 0.5, x.shape[2]) / x.shape[2],
    "a square of powers": lambda x: torch.vander(x[0, 0, :4], increasing=True) + torch.vander(x[1, 0])[:, -3:].sum(),
    "gradient": lambda x: torch.gradient(x, dim=2)[0],
    "gradient of second order": lambda x: torch.gradient(x, spacing=0.5, dim=(1, 2), edge_order=2)[1],
    "pairs": lambda x: (lambda at: x[:, :, at[0]] - x[:, :, at[1]])(torch.triu_indices(x.shape[2], x.shape[2], 1)),
    "half of a table": lambda x: x[:, :, torch.tril_indices(x.shape[2], x.shape[2])[1]].sum(2),
    "covariance": lambda x: torch.cov(x.flatten(0, 1)),
    "correlation": lambda x: torch.corrcoef(x[0]),
    "a chain of products": lambda x: torch.linalg.multi_dot([x[0], x[0].mT, x[0]]),
    "fftfreq": lambda x: x * torch.fft.fftfreq(x.shape[2], 0.5),
    "rfftfreq": lambda x: x[:, :, : x.shape[2] // 2 + 1] * torch.fft.rfftfreq(x.shape[2]),
}


@pytest.mark.jobs
@pytest.mark.parametrize("name", KEPT)
def test_a_size_that_torch_would_fix_stays_free_and_the_answer_is_torchs_own(name: str) -> None:
    class Of(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return KEPT[name](x)

    free = torch.export.Dim.DYNAMIC
    with tracing():
        program = torch.export.export(Of().eval(), (torch.randn(2, 3, 9),), dynamic_shapes=({2: free},), strict=False)
    for size in (4, 5, 8, 15, 100):
        x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(program.module()(x), Of()(x), rtol=1e-5, atol=1e-6)


class Degrees(nn.Module):
    """How many edges end at each node."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return x / torch.bincount(ends, minlength=x.shape[0]).clamp(min=1)[:, None]


@pytest.mark.slow
def test_numbers_are_counted_up_to_a_free_length() -> None:
    eager = EagerSession(Degrees(), (torch.randn(5, 2), torch.tensor([0, 4, 4])), dynamic_shapes={"ends": {0: "edges"}})
    program = torch_export.LoadedProgram(torch_export.export(eager.module, eager.calling))
    for nodes, ends in ((5, [0, 4, 4]), (1, [0]), (1, [0, 0, 0]), (7, [6])):
        given = {"x": torch.randn(nodes, 2), "ends": torch.tensor(ends)}
        answer = program.run({name: one.numpy() for name, one in given.items()})["output"]
        assert torch.equal(torch.from_numpy(answer), Degrees()(**given))
    for beyond in ([5], [-1]):
        with pytest.raises(RuntimeError, match="below minlength"):
            program.run({"x": torch.randn(5, 2).numpy(), "ends": torch.tensor(beyond).numpy()})
