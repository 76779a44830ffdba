"""Decoders that keep keys and values: in buffers of fixed size, in buffers that grow, and in their arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

POSITIONS = 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return (q @ k.transpose(1, 2)).masked_fill(~visible, -1e9).softmax(-1) @ v


class Slices(Attention):
    """Writes a slice that begins at a position."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, POSITIONS, 8))
        self.register_buffer("v", torch.zeros(1, POSITIONS, 8))
        self.register_buffer("pos", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        n = x.shape[1]
        self.k[:, self.pos : self.pos + n] = k
        self.v[:, self.pos : self.pos + n] = v
        self.pos += n
        return self.attend(q, self.k, self.v, torch.arange(POSITIONS) < self.pos)


class Steps(nn.Module):
    """A ring of 16 means, written at a position that a tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("ring", torch.zeros(16, 8))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.project(x)
        self.ring[self.step % 16] = hidden.mean(0)
        last = self.ring[self.step % 16]
        self.step += 1
        return hidden + self.ring.sum(0) / self.step + last


class Copies(Attention):
    """One token for each stream; the position has one element, which is no stream."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 16, 8))
        self.register_buffer("v", torch.zeros(1, 16, 8))
        self.register_buffer("pos", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x[:, None]).chunk(3, -1)
        self.k.index_copy_(1, self.pos, k)
        self.v.index_copy_(1, self.pos, v)
        self.pos += 1
        return self.attend(q, self.k, self.v, torch.arange(16) < self.pos)[:, 0]


class Given(Attention):
    """Past keys and values are arguments; a table of 64 positions ends past and new tokens together."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(POSITIONS, 8)

    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        past, new = past_k.shape[1], x.shape[1]
        q, k, v = self.project(x + self.positions(torch.arange(past, past + new))).chunk(3, -1)
        k, v = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
        return self.attend(q, k, v, torch.ones(new, past + new, dtype=torch.bool).tril(past)), k, v


class BeginsWithNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("cache", None)
        self.cache: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.project(x)
        self.cache = hidden if self.cache is None else torch.cat([self.cache, hidden])
        return hidden + self.cache.mean(0)


class LazyTable(nn.Module):
    """A buffer that the first call makes and that is then only read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.table: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(8.0)
        return x + self.table
