"""A slice that ends at a number holds for sizes on both sides of it, in both formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.runtime.open import open_session
from worlds import recipes
from worlds.cases import few

pytestmark = pytest.mark.slow


def truncate(self: nn.Module, x: Tensor) -> Tensor:
    return x[:, :8]


def keep_last(self: nn.Module, x: Tensor) -> Tensor:
    return x[:, -8:].mean(1)


def cut_both_ends(self: nn.Module, x: Tensor) -> Tensor:
    """Empty up to a length of 8."""
    return x[:, 5:-3].sum(1)


def take_a_part(self: nn.Module, x: Tensor) -> Tensor:
    return x[:, 4:9:2].sum(1) + x[..., None, -6:-2, :].sum((1, 2))


def write(self: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :8] *= 2
    y[:, 6:, 0] = 7
    return y


def index_beside(self: nn.Module, x: Tensor) -> Tensor:
    """A tensor of booleans indexes two dimensions, and a number one."""
    table = x[None, :, :, 0].expand(2, -1, -1).transpose(1, 2)
    return table[torch.ones(2, 1, dtype=torch.bool).expand(2, x.shape[1]), :7].sum(0) + x[0, :9].sum()


def model_of(forward: Callable[..., Any]) -> nn.Module:
    made: nn.Module = type("Model", (nn.Module,), {"forward": forward})()
    return made.eval()


@pytest.mark.parametrize("function", few([truncate, keep_last, cut_both_ends, take_a_part, write], 3))
def test_a_slice_ends_at_a_number_or_where_the_size_ends(function: Callable[..., Any], tmp_path: Path) -> None:
    eager = EagerSession(model_of(function), torch.randn(3, 20, 4), dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export_at(eager.module, eager.calling, {"length": 20})
    for format, emit in (("onnx", onnx_emit.emit), ("torch_export", torch_export.emit)):
        session = open_session(format, emit(exported, tmp_path / format), exported.signature)  # type: ignore[arg-type]
        for batch, length in ((1, 2), (2, 7), (7, 8), (3, 9), (5, 40)):
            x = {"x": torch.randn(batch, length, 4).numpy()}
            found, expected = session.run(x)["output"], eager.run(x)["output"]
            assert found.shape == expected.shape
            assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_numbers_and_masks_beside_a_slice_take_their_own_dimensions() -> None:
    eager = EagerSession(model_of(index_beside), torch.randn(3, 20, 4), dynamic_shapes={"x": {1: "length"}})
    program = torch_export.LoadedProgram(torch_export.export_at(eager.module, eager.calling, {"length": 20}))
    for length in (2, 8, 40):
        x = {"x": torch.randn(3, length, 4).numpy()}
        assert np.allclose(program.run(x)["output"], eager.run(x)["output"], rtol=1e-5, atol=1e-5)


class CacheStep(nn.Module):
    """Keys and values of the last 8 steps."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = torch.cat([keys, x[:, None]], 1)[:, -8:]
        values = torch.cat([values, 2 * x[:, None]], 1)[:, -8:]
        shares = torch.softmax((keys @ x[:, :, None]).squeeze(2), 1)
        return (shares[:, None] @ values).squeeze(1), keys, values


class Truncated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :8].sum(1)


@pytest.mark.jobs
@pytest.mark.parametrize("lengths", [(5, 12), (5, 6), (12, 20)])
def test_a_truncated_length_has_no_bound_whichever_side_the_examples_are_on(
    lengths: tuple[int, int], tmp_path: Path
) -> None:
    given = [torch.randn(batch, length, 3) for batch, length in zip((2, 3), lengths, strict=True)]
    capture(
        recipes.untrained(lambda: Truncated().eval(), examples=lambda: iter(given)),
        None,
        tmp_path / "b",
        formats=["onnx"],
    )
    signature = open_bundle(tmp_path / "b").manifest.signature
    assert all(signature.allows({"batch": 1, "length": length}) for length in (1, 7, 8, 9, 100_000))


@pytest.mark.jobs
def test_a_window_over_a_cache_that_grows_is_a_graph(tmp_path: Path) -> None:
    given = [
        tuple(torch.randn(batch, *more, 4) for more in ((), (past,), (past,))) for batch, past in ((2, 3), (1, 12))
    ]
    capture(
        recipes.untrained(lambda: CacheStep().eval(), examples=lambda: iter(given)),
        None,
        tmp_path / "b",
        formats=["onnx"],
    )
    bundle = open_bundle(tmp_path / "b")
    signature = bundle.manifest.signature
    for past in (1, 7, 8, 60):
        keys = np.zeros((3, past, 4), np.float32)
        signature.check({"x": keys[:, 0], "keys": keys, "values": keys})


class HeadAndTail(nn.Module):
    """Of steps and their mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        ends, shown = (torch.cat([one[:, :8], one[:, -8:]], 1) for one in (x, mask))
        return (ends * shown[..., None]).sum(1)


@pytest.mark.jobs
def test_sizes_that_are_one_in_all_examples_are_traced_larger_together(tmp_path: Path) -> None:
    given = [(torch.randn(batch, length, 3), torch.ones(batch, length)) for batch, length in ((3, 5), (2, 13))]
    recipe = recipes.untrained(lambda: HeadAndTail().eval(), examples=lambda: iter(given))
    capture(recipe, None, tmp_path / "b", formats=["onnx"])
    signature = open_bundle(tmp_path / "b").manifest.signature
    for length in (5, 13, 60):
        x = np.zeros((2, length, 3), np.float32)
        signature.check({"x": x, "mask": x[..., 0]})
