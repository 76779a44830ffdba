"""What a model does beside its answer is left out, and only where every answer stays what it was."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.survey import Survey, survey
from worlds.cases import few

pytestmark = pytest.mark.slow


class Talks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            warnings.warn("NaN in the input", stacklevel=2)
        return x.tanh() * 2


class Checks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all() or x.isinf().all(), "no numbers"
        if x.abs().max() > 1e30 and torch.isfinite(x).any():
            raise ValueError("too large")
        return x * 2


class ChecksOnce(nn.Module):
    """What it checks is in no answer."""

    def forward(self, x: Tensor) -> Tensor:
        weights = x.softmax(-1)
        assert torch.isfinite(weights).all() or weights.isnan().any(), "no numbers"
        return x * 2


class ChecksPlainly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any(), "no numbers"
        return x * 2


class KeepsPositions(nn.Module):
    """One table for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.kept:
            steps = torch.arange(n)
            self.kept[n] = steps.unsqueeze(1) / 10
        return x + self.kept[n].sin()


class KeepsMaybe(KeepsPositions):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        steps = self.kept.get(n)
        if steps is None:
            steps = torch.arange(n).unsqueeze(1) / 10
            self.kept[n] = steps
        return x + steps.sin()


class KeepsOrRaises(KeepsPositions):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        try:
            steps = self.kept[n]
        except KeyError:
            steps = self.kept[n] = torch.arange(n).unsqueeze(1) / 10
        return x + steps.sin()


class KeepsByDefault(KeepsPositions):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        steps = self.kept.setdefault(n, torch.arange(n).unsqueeze(1) / 10)
        return x + steps.sin()


class KeepsAnswers(nn.Module):
    """By a key that does not say all: what is kept decides the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.kept:
            self.kept[n] = x.mean()
        return x + self.kept[n]


def examined(model: nn.Module, x: Tensor) -> Survey:
    eager = EagerSession(model.eval(), x, dynamic_shapes={"x": {1: "length"}})
    return survey(model, calls_of(eager), onnx=None, base=Path(__file__).parent)


def test_a_check_that_a_program_keeps_needs_no_rewrite() -> None:
    assert examined(ChecksPlainly(), torch.randn(3, 6, 4)).rows["(model)"].status == "ready"


@pytest.mark.parametrize(
    ("model", "gone"),
    few(
        [
            (Talks, ("warnings.warn",)),
            (ChecksOnce, ("assert",)),
            (KeepsPositions, ("not in self.kept",)),
            (KeepsMaybe, ("self.kept.get(n)", "is None")),
            (KeepsOrRaises, ("try:", "except KeyError")),
            (KeepsByDefault, ("setdefault",)),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_what_changes_no_answer_is_left_out_and_the_rest_is_proven(
    model: type[nn.Module], gone: tuple[str, ...]
) -> None:
    row = examined(model(), torch.randn(3, 6, 4)).rows["(model)"]
    assert row.status == "rewritten"
    assert row.rewrite is not None
    assert row.rewrite.probes >= 10
    removed = [line for line in row.rewrite.diff.splitlines() if line.startswith("-")]
    assert all(any(word in line for line in removed) for word in gone)
    assert all("left out" in step for step in row.rewrite.steps)


@pytest.mark.jobs
def test_a_check_becomes_a_lookup_that_fails_where_it_raised() -> None:
    row = examined(Checks(), torch.randn(3, 6, 4)).rows["(model)"]
    assert row.status == "rewritten"
    assert row.rewrite is not None
    assert all("looks up an entry that does not exist" in step for step in row.rewrite.steps)
    added = [line[1:].strip() for line in row.rewrite.diff.splitlines() if line.startswith("+") and "x = " in line]
    assert len(added) == 2
    for bad in (torch.tensor([1.0, torch.nan]), torch.tensor([1e31, 1.0])):
        with pytest.raises(IndexError):
            exec("\n".join(added), {"torch": torch, "x": bad})
    fine = {"torch": torch, "x": torch.tensor([-0.0, 2.0])}
    exec("\n".join(added), fine)
    assert torch.equal(fine["x"], torch.tensor([-0.0, 2.0]))
    assert torch.signbit(fine["x"])[0]


def test_what_is_kept_and_decides_an_answer_is_not_computed_anew() -> None:
    row = examined(KeepsAnswers(), torch.randn(3, 6, 4)).rows["(model)"]
    assert row.status == "blocked"


class KeepsAShare(nn.Module):
    """The best steps of each record, so many of the length."""

    def forward(self, x: Tensor) -> Tensor:
        k = int(0.6 * x.shape[1])
        return x.sort(1, descending=True)[0][:, :k]


def test_a_share_of_a_length_stays_free() -> None:
    row = examined(KeepsAShare(), torch.randn(3, 6, 4)).rows["(model)"]
    assert row.status == "rewritten"
    assert row.rewrite is not None
    assert "+        k = torch.sym_int(0.6 * x.shape[1])" in row.rewrite.diff


class Experts(nn.Module):
    """Each on the records that chose it, and none where nobody did."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]))
        return out


def test_skipping_what_would_change_nothing_is_left_out() -> None:
    torch.manual_seed(0)
    eager = EagerSession(Experts().eval(), torch.randn(5, 4))
    row = survey(eager.module, calls_of(eager), onnx=None, base=Path(__file__).parent).rows["(model)"]
    assert row.status == "rewritten"
    assert row.rewrite is not None
    assert "-                continue" in row.rewrite.diff


def unpadded(x: Tensor) -> Tensor | None:
    """Where a record is filled up; none where none is."""
    mask = x[..., 0] > 0
    if not mask.any():
        mask = None  # type: ignore[assignment]
    return mask


class Attends(nn.Module):
    """A mask that masks nothing is left out of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        scores, mask = x @ x.transpose(1, 2), unpadded(x)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1), -1e4)
        return scores.softmax(-1) @ x


class Notices(nn.Module):
    """It matters whether there was a mask."""

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor | None = x[..., 0] > 0
        if not mask.any():
            mask = None
        return x if mask is None else x + 1


def test_a_mask_that_is_forgotten_where_it_masks_nothing_is_kept() -> None:
    row = examined(Attends(), torch.randn(3, 6, 4)).rows["(model)"]
    assert row.status == "rewritten", row.why_not
    assert row.rewrite is not None
    assert "-        mask = None" in row.rewrite.diff


def test_a_mask_whose_absence_matters_is_not_kept() -> None:
    assert examined(Notices(), torch.randn(3, 6, 4)).rows["(model)"].status == "blocked"
