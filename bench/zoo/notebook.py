"""Models as they stand in notebooks: packed sequences, memos, messages, shares of a length, dataclasses, odd sizes.

What each has in it is common, and no exporter takes it as it is, or takes it and is wrong at some sizes.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from bench.zoo.entry import Shelf, ids, lengths, real
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SHELF = Shelf(group="notebook", sizes={"batch": 3, "length": 6, "height": 13, "width": 18})


class PackedLstm(nn.Module):
    """The last states of both directions, each at its own end."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (h, _) = self.rnn(packed)
        found: Tensor = self.head(torch.cat([h[0], h[1]], -1))
        return found


class PackedGru(nn.Module):
    """All outputs, padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 6, 2, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return found


class OddUNet(nn.Module):
    """Images of any size: what comes up is padded to what was put aside."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        aside = F.relu(self.down(x))
        y = self.up(F.relu(self.middle(F.max_pool2d(aside, 2))))
        dh, dw = aside.size(2) - y.size(2), aside.size(3) - y.size(3)
        y = F.pad(y, [dw // 2, dw - dw // 2, dh // 2, dh - dh // 2])
        found: Tensor = self.last(torch.cat([aside, y], 1))
        return found


class NearestPyramid(nn.Module):
    """Coarser maps in the size of the finest, the nearest element of each."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv1d(4, 4, 3, stride=stride, padding=1) for stride in (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        fine = x.transpose(1, 2)
        found = fine
        for level in self.levels:
            found = found + F.interpolate(level(fine), size=fine.shape[-1])
        return found


class BestShare(nn.Module):
    """The first third of the steps, rounded up."""

    def forward(self, x: Tensor) -> Tensor:
        count = math.ceil(x.shape[1] * 0.3)
        return x[:, :count].sum(1)


class FarBranch(nn.Module):
    """Long sequences are halved; the border is a fraction, far from the example."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] / 8 > 2:
            return x.sum(1) * 0.5
        return x.sum(1)


class Memo(nn.Module):
    """Positions are kept for each length that has been met."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.kept:
            steps = torch.arange(n).unsqueeze(1) / torch.pow(100.0, torch.arange(4) / 4)
            self.kept[n] = torch.sin(steps)
        return x + self.kept[n]


class Talkative(nn.Module):
    """Warns, prints, and checks its input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            warnings.warn("NaN in the input", stacklevel=2)
        assert x.abs().max() < 1e30, "too large"
        found: Tensor = self.head(x)
        return found


class SkippedExperts(nn.Module):
    """The two best experts of each record; one that no record chose is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).topk(2, -1)
        weights, out = weights.softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return out


@dataclass
class Found:
    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class Answering(nn.Module):
    """Answers with a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Found:
        hidden = self.body(x).tanh()
        return Found(logits=self.head(hidden), hidden=hidden)


class FourierOperator(nn.Module):
    """The lowest frequencies are mixed, in complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 4, dtype=torch.cfloat) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        f = torch.fft.rfft(x)
        out = torch.zeros_like(f)
        out[:, :, :4] = torch.einsum("bix,iox->box", f[:, :, :4], self.weight)
        return torch.fft.irfft(out, n=x.size(-1)).transpose(1, 2)


class Hashed(nn.Module):
    """Ids of a large space share few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.rows((ids * 2654435761 + 12345) % 16) + self.rows(((ids ^ (ids >> 3)) * 40503) % 16)
        return found


def _fill(shelf: Shelf) -> None:
    rows, steps = real("batch", 4), real("batch", "length", 4)
    for packed in (PackedLstm, PackedGru):
        shelf.add(packed.__name__, packed, {"x": steps, "lengths": lengths("length", "batch")})
    shelf.add("OddUNet", OddUNet, {"x": real("batch", 3, "height", "width")})
    for timed in (NearestPyramid, BestShare, FarBranch, Memo):
        shelf.add(timed.__name__, timed, {"x": steps})
    for plain in (Talkative, SkippedExperts, Answering):
        shelf.add(plain.__name__, plain, {"x": rows})
    shelf.add("FourierOperator", FourierOperator, {"x": real("batch", "length", 3)}, length=12)
    shelf.add("Hashed", Hashed, {"ids": ids(1_000_000, "batch", "length")})


_fill(SHELF)
