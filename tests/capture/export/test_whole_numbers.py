"""Whole numbers of Python have no end, those of programs have: claims end before it, or a format is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import Bundle, open_bundle
from trueline.capture.api import capture
from trueline.runtime.open import open_program
from worlds import recipes
from worlds.cases import few

pytestmark = pytest.mark.slow
LENGTHS = {"examples": lambda: torch.randn(3, 5), "dynamic_shapes": lambda: {"x": {1: "length"}}}
IDS = {"examples": lambda: torch.arange(12).reshape(3, 4)}


def captured(model: type[nn.Module], out: Path, **blanks: object) -> Bundle:
    torch.manual_seed(0)
    return open_bundle(capture(recipes.untrained(model, **blanks), None, out).path)


class HashesItsLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) + x.shape[1] ** 5 % 97


@pytest.mark.jobs
def test_a_length_whose_power_passes_2_to_the_63_is_not_claimed(tmp_path: Path) -> None:
    """6,208 ** 5 is the last that is below."""
    bundle = captured(HashesItsLength, tmp_path / "b", **LENGTHS)
    assert bundle.signature.dims["length"].max == 6208
    assert bundle.signature.dims["batch"].max is None
    x = np.zeros((2, 6208), np.float32)
    for program in bundle.manifest.programs:
        (found,) = open_program(bundle, program.format).run({bundle.signature.inputs[0].name: x}).values()
        assert (found == 6208**5 % 97).all(), program.format


class HashesBothSizes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) + (x.shape[0] * x.shape[1]) ** 3 % 97


@pytest.mark.jobs
def test_two_sizes_end_where_a_number_of_both_passes_2_to_the_63(tmp_path: Path) -> None:
    dims = captured(HashesBothSizes, tmp_path / "b", **LENGTHS).signature.dims
    most = dims["batch"].max, dims["length"].max
    assert most == (1448, 1448)
    assert (1448 * 1448) ** 3 < 2**63 <= (1449 * 1449) ** 3


class CountsItsNumbers(nn.Module):
    """A product of two sizes and a few: no program is wrong where such a tensor fits into memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.numel() * 4)


@pytest.mark.jobs
def test_a_count_of_numbers_ends_no_claim(tmp_path: Path) -> None:
    dims = captured(CountsItsNumbers, tmp_path / "b", **LENGTHS).signature.dims
    assert (dims["batch"].max, dims["length"].max) == (None, None)


class HashesAnId(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids + ids.sum().item() * 2_654_435_761 % 97


class SquaresASum(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        total = ids.sum().item()
        return ids + total * total % 97


@pytest.mark.parametrize("model", few([HashesAnId, SquaresASum], 1, pytest.mark.jobs))
def test_a_hash_of_values_is_answered_by_torch_alone(model: type[nn.Module], tmp_path: Path) -> None:
    bundle = captured(model, tmp_path / "b", **IDS)
    assert [one.format for one in bundle.manifest.programs] == ["torch_export"]
    attempts = {one["format"]: one for one in bundle.lineage()["attempts"]}
    assert "may pass 2**63" in attempts["onnx"]["why"]
    assert f"{Path(__file__).name}:" in attempts["onnx"]["line"]
    ids = np.full((2, 4), 2**35 + 7)
    (found,) = open_program(bundle, "torch_export").run({bundle.signature.inputs[0].name: ids}).values()
    assert np.array_equal(found, model()(torch.from_numpy(ids)).numpy())


class CountsAMask(nn.Module):
    """A count, however it is multiplied by a small number, stays far below."""

    def forward(self, x: Tensor) -> Tensor:
        return x / ((x > 0).sum().item() * 40 + 1)


@pytest.mark.jobs
def test_a_count_of_a_mask_is_answered_by_every_format(tmp_path: Path) -> None:
    bundle = captured(CountsAMask, tmp_path / "b", examples=lambda: torch.randn(3, 4))
    assert [one.format for one in bundle.manifest.programs] == ["onnx", "torch_export"]


class RaisesToItself(nn.Module):
    """A power that has millions of digits at usual lengths."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        return x.mean(1) + n**n % 97


@pytest.mark.jobs
def test_a_power_without_an_end_is_never_computed(tmp_path: Path) -> None:
    """15 ** 15 is the last that is below 2**63."""
    assert captured(RaisesToItself, tmp_path / "b", **LENGTHS).signature.dims["length"].max <= 15
