"""Sizes at which the code takes another way are claimed where the program answers them as the model does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import Bundle, open_bundle
from trueline.bundle.signature import Dim
from trueline.capture.api import capture
from trueline.errors import RequestError
from trueline.runtime.open import open_program
from worlds import recipes
from worlds.cases import few

pytestmark = pytest.mark.slow
Shape = tuple[int, ...]


class PatchMerging(nn.Module):
    """Of Swin: odd sides are filled up before every second row and column is taken."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        if height % 2 == 1 or width % 2 == 1:
            x = nn.functional.pad(x, (0, 0, 0, width % 2, 0, height % 2))
        parts = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        return torch.cat(parts, -1)


class Positions(nn.Module):
    """Of a vision transformer: positions are interpolated unless the image has the grid that they were learnt on."""

    def __init__(self, *, doubled: bool = False) -> None:
        super().__init__()
        self.patches, self.doubled = nn.Conv2d(3, 4, 4, 4), doubled
        self.positions = nn.Parameter(torch.randn(1, 16, 4))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[2] // 4, x.shape[3] // 4
        return self.patches(x).flatten(2).transpose(1, 2) + self.positions_of(rows, columns)

    def positions_of(self, rows: int, columns: int) -> Tensor:
        if rows * columns == 16 and rows == columns:
            return self.positions * 2 if self.doubled else self.positions
        grid = self.positions.reshape(1, 4, 4, 4).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, size=(rows, columns), mode="bicubic")
        return grid.flatten(2).transpose(1, 2)


class Trimmed(nn.Module):
    """A tenth of both ends is left out, at least one of each where that leaves any."""

    def forward(self, x: Tensor) -> Tensor:
        out = max(1, int(x.shape[1] * 0.1))
        if x.shape[1] > 2 * out:
            x = x[:, out:-out]
        return x.mean(1)


def sealed(model: nn.Module, out: Path, *shapes: Shape) -> Bundle:
    def examples() -> Iterator[Tensor]:
        torch.manual_seed(0)
        for shape in shapes:
            yield torch.randn(shape)

    torch.manual_seed(0)
    capture(recipes.untrained(lambda: model.eval(), examples=examples), None, out)
    return open_bundle(out)


@pytest.mark.parametrize(
    ("model", "shapes", "least", "others"),
    few(
        [
            (
                PatchMerging,
                [(2, 15, 13, 4), (2, 9, 16, 4)],
                {"x.1": 1, "x.2": 1},
                [(1, 14, 12, 4), (3, 1, 1, 4), (1, 60, 91, 4)],
            ),
            (
                Positions,
                [(2, 3, 16, 16), (2, 3, 20, 12)],
                {"x.2": 4, "x.3": 4},
                [(1, 3, 4, 7), (1, 3, 19, 17), (2, 3, 8, 32), (2, 3, 80, 9)],
            ),
            (Trimmed, [(2, 50, 4), (3, 70, 4)], {"length": 3}, [(1, 3, 4), (2, 9, 4), (2, 10, 4), (2, 999, 4)]),
        ],
        2,
        pytest.mark.jobs,
    ),
)
def test_a_special_way_that_the_program_need_not_take_is_in_its_claim(
    model: type[nn.Module], shapes: Sequence[Shape], least: dict[str, int], others: Sequence[Shape], tmp_path: Path
) -> None:
    made = model()
    bundle = sealed(made, tmp_path / "b", *shapes)
    assert {name: bundle.signature.dims[name] for name in least} == {name: Dim(min=one) for name, one in least.items()}
    assert bundle.signature.guards == ()
    for format in ("onnx", "torch_export"):
        session = open_program(bundle, format)
        for shape in [*shapes, *others]:
            x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
            expected = made(torch.from_numpy(x)).detach().numpy()
            np.testing.assert_allclose(session.run({"x": x})["output"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.jobs
def test_a_special_way_with_another_answer_is_in_no_claim(tmp_path: Path) -> None:
    bundle = sealed(Positions(doubled=True), tmp_path / "b", (2, 3, 20, 12), (2, 3, 24, 40))
    for format in ("onnx", "torch_export"):
        with pytest.raises(RequestError, match="is not 16"):
            open_program(bundle, format).run({"x": np.zeros((2, 3, 16, 16), np.float32)})


class Sixths(nn.Module):
    """Traced at a larger height, it holds for any height and fewer widths."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        if height % 6 == 1 or width % 6 == 1:
            x = nn.functional.pad(x, (0, 0, 0, width % 6, 0, height % 6))
        return x * 2


@pytest.mark.jobs
def test_a_trace_at_larger_sizes_loses_no_example(tmp_path: Path) -> None:
    bundle = sealed(Sixths(), tmp_path / "b", (2, 13, 13, 4), (2, 7, 14, 4))
    assert {"onnx", "torch_export"} <= {one.format for one in bundle.manifest.programs}
    assert bundle.signature.allows({"batch": 2, "x.1": 7, "x.2": 14})


class KeptQuarter(nn.Module):
    """Of a masked autoencoder: a quarter of the patches is kept, those with the least noise."""

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        shuffled = torch.argsort(noise, dim=1)
        kept = shuffled[:, : int(x.shape[1] * (1 - 0.75))]
        given = torch.gather(x, 1, kept[..., None].repeat(1, 1, x.shape[2]))
        masked = torch.zeros(x.shape[0], shuffled.shape[1] - given.shape[1], x.shape[2])
        return torch.gather(torch.cat([given, masked], 1), 1, torch.argsort(shuffled)[..., None].expand_as(x))


@pytest.mark.jobs
def test_lengths_that_are_equal_in_all_examples_are_free_together(tmp_path: Path) -> None:
    examples = [(torch.randn(2, size, 3), torch.randn(2, size)) for size in (16, 12)]
    capture(recipes.untrained(KeptQuarter, examples=lambda: iter(examples)), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    assert {"onnx", "torch_export"} <= {one.format for one in bundle.manifest.programs}
    x, noise = torch.randn(3, 41, 3), torch.randn(3, 41)
    (answer,) = open_program(bundle, "onnx").run({"x": x.numpy(), "noise": noise.numpy()}).values()
    np.testing.assert_array_equal(answer, KeptQuarter()(x, noise).numpy())
