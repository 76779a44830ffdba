"""Bags of rows whose offsets fall are refused, by the model and by its programs: torch reads beyond its ids there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.errors import RequestError
from trueline.runtime.open import open_program
from trueline.runtime.tensors import check_offsets
from worlds import recipes

FALLING = ([0, 4, 2], [0, -(10**9), 3], [0, 10**9, 3], [0, 9, 0])
IDS, TABLE = torch.arange(9), torch.randn(9, 4)


class Bags(nn.Module):
    """Offsets are made of counts, one of which may be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 4, mode="sum")

    def forward(self, ids: Tensor, counts: Tensor) -> Tensor:
        found: Tensor = self.bag(ids, F.pad(counts.cumsum(0), (1, 0))[:-1])
        return found


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_bag_is_not_read_where_its_offsets_fall(mode: str, grad: bool) -> None:
    check_offsets()
    table = TABLE.clone().requires_grad_(grad)
    for offsets in FALLING:
        with pytest.raises(ValueError, match=r"offsets of bags have to grow: bag \d begins at"):
            F.embedding_bag(IDS, table, torch.tensor(offsets), mode=mode)
    rows = [TABLE[:4].sum(0), torch.zeros(4), TABLE[4:].sum(0)]
    torch.testing.assert_close(F.embedding_bag(IDS, table, torch.tensor([0, 4, 4]), mode="sum"), torch.stack(rows))


@pytest.mark.slow
@pytest.mark.jobs
def test_a_request_with_a_negative_count_is_refused_by_each_program(tmp_path: Path) -> None:
    examples = [(torch.arange(n), torch.tensor(counts)) for n, counts in ((9, [3, 2, 4]), (12, [3, 2, 4, 1]))]
    capture(recipes.untrained(lambda: Bags().eval(), examples=lambda: iter(examples)), None, tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    formats = [entry.format for entry in bundle.manifest.programs]
    assert "onnx" in formats
    ids = np.arange(9)
    for name in formats:
        session = open_program(bundle, name)
        given = dict(zip([spec.name for spec in session.signature.inputs], (ids, np.array([3, -2, 4])), strict=True))
        with pytest.raises(RequestError):
            session.run(given)
