"""A size as a key or a text: a table for a size is made for all, and what a set or a text decides is compared."""

from __future__ import annotations

import functools
import json
import pprint
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import Bundle, open_bundle
from trueline.bundle.signature import Dim
from trueline.capture.api import capture
from trueline.capture.patches import size_keys
from worlds import recipes
from worlds.cases import few

pytestmark = pytest.mark.slow


class MaskOfLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[object, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = (x.shape[1], x.dtype)
        if key not in self.masks:
            self.masks[key] = torch.ones(x.shape[1], x.shape[1]).tril()
        return self.masks[key] @ x


class Cached(nn.Module):
    @staticmethod
    @functools.lru_cache
    def places(length: int) -> Tensor:
        return torch.arange(length) / 10

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places(x.shape[1])[:, None]


class Rotating(nn.Module):
    """A table that grows with the longest input."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.table is None or length > self.longest:
            self.table, self.longest = torch.arange(length).cos(), length
        return x * self.table[:length, None]


class InSet(nn.Module):
    odd = frozenset({37, 91})

    def forward(self, x: Tensor) -> Tensor:
        return -x if x.shape[1] in self.odd else x


class AsText(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x if f"{x.shape[1]}".endswith("9") else x


class InForm(nn.Module):
    """A text with leading zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        name = f"table_{x.shape[1]:04d}"
        if name not in self.tables:
            self.tables[name] = torch.arange(x.shape[1]).cos()
        return x * self.tables[name][:, None]


class FormDecides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x if f"{x.shape[1]:03d}" == "023" else x


class AsJson(nn.Module):
    scales = {json.dumps([23, 4]): 2.0}  # noqa: RUF012 - as a user writes it

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales.get(json.dumps(list(x.shape[1:])), 1.0)


class AsPrettyText(nn.Module):
    """Written by a function of Python's library."""

    def forward(self, x: Tensor) -> Tensor:
        return -x if pprint.pformat(x.shape[1]).startswith("7") else x


def captured(model: type[nn.Module], out: Path) -> Bundle:
    examples = [torch.linspace(-1, 1, 3 * n * 4).reshape(3, n, 4) for n in (5, 8)]
    capture(recipes.untrained(model, examples=lambda: iter(examples)), None, out)
    return open_bundle(out)


@pytest.mark.parametrize("model", [*few([Cached, Rotating, MaskOfLength], 1), *few([InForm], 0, pytest.mark.jobs)])
def test_a_table_made_for_a_size_is_made_for_all_in_a_graph(model: type[nn.Module], tmp_path: Path) -> None:
    bundle = captured(model, tmp_path / "b")
    length = bundle.signature.dims["length"]
    assert {one.format for one in bundle.manifest.programs} == {"onnx", "torch_export"}
    assert length.max is None or length.max >= 64


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("model", "most"), [(InSet, 36), (AsText, 8), (AsJson, 22), (FormDecides, 22), (AsPrettyText, 6)]
)
def test_what_a_set_or_a_text_decides_ends_the_claim(model: type[nn.Module], most: int, tmp_path: Path) -> None:
    assert captured(model, tmp_path / "b").signature.dims["length"] == Dim(max=most)


def test_the_hash_and_the_text_of_a_size_are_torchs_own_again_after_the_block() -> None:
    before, encoded = (torch.SymInt.__hash__, torch.SymInt.__repr__), json.JSONEncoder.default
    with size_keys.watch():
        assert torch.SymInt.__hash__ is not before[0]
    assert (torch.SymInt.__hash__, torch.SymInt.__repr__) == before
    assert "__format__" not in vars(torch.SymInt)
    assert json.JSONEncoder.default is encoded
