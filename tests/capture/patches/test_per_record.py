"""A model that goes through the batch record by record is captured for any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.capture.patches import per_record
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove
from trueline.errors import CaptureError
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow


class EachRow(nn.Module):
    """Each record through the layer by itself, as many times as a mask of its own making says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.full((4,), 0.25))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = torch.ones(x.shape[0], 3, dtype=torch.int64)
        mask[:, 2] = 0
        rows = []
        for row, times in zip(x, mask.sum(1), strict=True):
            for _ in range(int(times)):
                row = self.linear(row).tanh() + self.shift
            rows.append(row)
        out = torch.stack(rows)
        return {"out": out, "mean": out.mean(1)}


class Neighbours(nn.Module):
    """Each record looks at all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row - x.mean(0) for row in x])


class BaggedRows(nn.Module):
    """Each record's bag of ids, one record after the other; the exporter says by sizes of both that the batch is 3."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 6, mode="sum")

    def forward(self, ids: Tensor, pick: Tensor) -> Tensor:
        rows: Tensor = self.bag(ids)
        rows = rows + rows.gather(1, pick.unsqueeze(1))
        for at in range(rows.shape[0]):
            rows[at] * 2 if at < 40 else rows[at]
        return rows


class Shuffled(nn.Module):
    """The columns of each record in an order that is drawn for it, and how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [row[torch.multinomial(torch.ones(5), 5)] for row in x]
        return torch.stack(rows).cumsum(1)


def test_a_model_that_loops_over_its_records_is_proven_for_any_batch_in_both_formats(tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = EagerSession(EachRow().eval(), torch.randn(3, 4))
    exported = torch_export.export(eager.module, eager.calling)
    assert exported.signature.dims["batch"].max is None
    assert "one record after the other" in exported.how
    probes = make_probes(eager.example, signature=exported.signature)
    paths = {"onnx": emit.emit(exported, tmp_path), "torch_export": torch_export.emit(exported, tmp_path)}
    for format, path in paths.items():
        found = prove(open_session(format, path, exported.signature), eager, probes)  # type: ignore[arg-type]
        assert found.proven, found.reason
        batches = {one.shapes["x"][0] for one in found.evidence if one.verdict == "agrees"}
        assert batches >= {1, 2, 3, 32}


@pytest.mark.jobs
def test_a_batch_that_only_a_guard_of_several_sizes_fixes_is_taken_record_by_record_too() -> None:
    pick = torch.tensor([0, 5, 2])
    shorter, longer = ((torch.randint(0, 20, (3, length)), pick) for length in (3, 16))
    eager = EagerSession(BaggedRows().eval(), shorter, others=[longer])
    exported = torch_export.export(eager.module, eager.calling)
    assert "one record after the other" in exported.how
    assert exported.signature.dims["batch"].allows(1)


def test_records_that_look_at_each_other_are_not_taken_one_by_one_and_the_first_refusal_stands() -> None:
    eager = EagerSession(Neighbours().eval(), torch.randn(3, 4))
    with pytest.raises(CaptureError, match="works for batches of 3 only"):
        torch_export.export(eager.module, eager.calling)


def test_what_is_drawn_for_each_record_is_an_order_of_it_in_both_formats(tmp_path: Path) -> None:
    eager = EagerSession(Shuffled().eval(), torch.randn(3, 5))
    exported = torch_export.export(eager.module, eager.calling)
    x = torch.arange(1.0, 11.0).reshape(2, 5).numpy()
    paths = {"onnx": emit.emit(exported, tmp_path), "torch_export": torch_export.emit(exported, tmp_path)}
    for format, path in paths.items():
        session = open_session(format, path, exported.signature)  # type: ignore[arg-type]
        seen = set()
        for _ in range(50):
            (answer,) = session.run({"x": x}).values()
            drawn = torch.from_numpy(answer).diff(dim=1, prepend=torch.zeros(2, 1))
            assert torch.equal(drawn.sort(1).values, torch.from_numpy(x))
            seen.add(tuple(drawn[0].tolist()))
        assert len(seen) > 20


def test_a_traced_value_that_is_written_into_a_known_one_is_refused_and_not_lost() -> None:
    known = torch.tensor([1.0, 2.0])
    with per_record.KnownValues():
        ours = torch.zeros(2)
        with pytest.raises(NotImplementedError, match="__setitem__"):
            ours[:1] = known[:1]  # made outside the block, as what is traced is
        assert int(torch.ones(3, dtype=torch.int64).sum()) == 3
