"""Rows that lose elements by their values and are padded again keep their length, under a mask of what is left."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.export import export_module
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import Survey, survey
from worlds.cases import few

pytestmark = pytest.mark.slow
SIZES = ((2, 8), (3, 12), (1, 5), (4, 1))


class Collapsed(nn.Module):
    """Greedy CTC: repeats, then blanks."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        best, out = x.argmax(-1), []
        for row, n in zip(best, lengths, strict=True):
            row = torch.unique_consecutive(row[:n])
            row = row[row != 0]
            out.append(F.pad(row, (0, x.shape[1] - row.shape[0]), value=-1))
        return torch.stack(out)


class Written(nn.Module):
    """The same into zeros, with the number of elements."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        ids = x.argmax(-1)
        out, sizes = torch.zeros_like(ids), []
        for i in range(ids.shape[0]):
            seq = torch.unique_consecutive(ids[i, : lengths[i]])
            seq = seq[seq != 0]
            out[i, : len(seq)] = seq
            sizes.append(torch.tensor(len(seq)))
        return out, torch.stack(sizes)


class Joined(nn.Module):
    """Blanks go first, so that equal elements meet; zeros are appended."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = []
        for row in x.argmax(-1):
            row = row[row != 1]
            row = row.unique_consecutive()
            out.append(torch.cat([row, torch.zeros(x.shape[1] - len(row), dtype=torch.int64)]))
        return torch.stack(out) + lengths[:, None]


class Summed(nn.Module):
    """A sum of a shortened row has no mask."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = []
        for row, n in zip(x.argmax(-1), lengths, strict=True):
            row = row[row != 1]
            out.append(F.pad(row, (0, x.shape[1] - row.shape[0])) * row.sum() * n)
        return torch.stack(out)


def asked(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (batch,), generator=random)
    return torch.randn(batch, length, 3, generator=random), lengths


def look_at(model: nn.Module) -> Survey:
    free = {"x": {1: "length"}}
    return survey(model, calls_of(EagerSession(model, asked(2, 8), dynamic_shapes=free)), onnx=None, base=Path.cwd())


@pytest.mark.parametrize(
    "kind", few([Collapsed, Written, pytest.param(Joined, marks=pytest.mark.long)], 1, pytest.mark.jobs)
)
def test_rows_that_values_shorten_are_rewritten_and_answer_as_before(kind: type[nn.Module]) -> None:
    model = kind().eval()
    done = look_at(copy.deepcopy(model))
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    assert "keep their length under a mask" in " ".join(row.rewrite.steps)
    edited = patch_module(model, done.texts)
    for seed, (batch, length) in enumerate(SIZES * 3):
        inputs = asked(batch, length, seed)
        torch.testing.assert_close(edited(*inputs), model(*inputs), rtol=0, atol=0)
    inputs = asked(3, 9)[0], torch.tensor([-1, 0, 9])  # as Python counts from the end, and nothing at all
    torch.testing.assert_close(edited(*inputs), model(*inputs), rtol=0, atol=0)


def test_a_shortened_row_that_is_read_for_something_else_is_left_as_it_is() -> None:
    row = look_at(Summed().eval()).rows["(model)"]
    assert row.rewrite is None or "mask of what is left" not in " ".join(row.rewrite.steps)


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Torn(nn.Module):
    def forward(self, *given: Tensor) -> Tensor:
        Watching().__enter__()  # as torch does where it fails under a mode of the search
        raise ValueError


def test_an_export_that_fails_leaves_nothing_on_that_later_exports_pass_through() -> None:
    before = len(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"^\s*$|forward"):
        export_module(Torn(), (torch.randn(2, 8),), ({},))
    assert len(_get_current_function_mode_stack()) == before  # type: ignore[no-untyped-call]
