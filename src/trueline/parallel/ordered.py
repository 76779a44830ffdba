"""Sums of shards' gradients whose every bit is independent of the number of workers.

Floating-point addition is not associative, so an allreduce over another number of workers gives other last bits. Here
the gradient of each shard is a row of its own and the rows are added in the order of the shards, whoever holds them:

    rank r: rows of its shards ──all-to-all──▶ piece r of every row ──add in order──▶ piece r of the sum ──all-gather──▶

Each rank sends its rows once and the sum once: rows / workers + 1 gradients' worth, where an allreduce sends about two.
Rows lie in host memory, also those of a model on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from trueline.parallel.exchange import Piece, Shares
from trueline.parallel.gloo import GlooGroup


class OrderedSum:
    """Rows of `parameters`' gradients with `extra` numbers beside each.

    The memory of rows and sums is kept from step to step: to be given megabytes anew takes as long as to add them.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: GlooGroup, extra: int) -> None:
        self._group = group
        self._parameters = list(parameters)
        wide = any(parameter.dtype == torch.float64 for parameter in self._parameters)
        self._dtype = torch.float64 if wide else torch.float32
        self._length = sum(parameter.numel() for parameter in self._parameters) + extra
        self._kept: dict[str, torch.Tensor] = {}
        self._rows = torch.empty(0)
        """[ranks, room for rows, width]: piece r of every row lies together, as it is sent."""
        self._count = 0

    def enter(self) -> None:
        """A group was formed. An operation of the one before may be under way still, and keeps its memory to itself."""
        self._kept, self._rows = {}, torch.empty(0)
        self.drop()

    def add(self, extra: torch.Tensor) -> None:
        """Makes a row of the gradients at hand, and takes them away."""
        size = dist.get_world_size()
        width = -(-self._length // size)
        row = self._memory("row", size * width)
        row[self._length :] = 0.0
        at = 0
        for value in (*(self._gradient(parameter) for parameter in self._parameters), extra):
            row[at : at + value.numel()].copy_(value.reshape(-1))
            at += value.numel()
        if self._rows.numel() == 0 or self._count == self._rows.shape[1]:
            more = torch.empty(size, self._count + 1, width, dtype=self._dtype)
            more[:, : self._count] = self._rows if self._count else 0.0
            self._rows = more
        self._rows[:, self._count] = row.view(size, width)
        self._count += 1
        self.clear()

    @staticmethod
    def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def _memory(self, name: str, numbers: int) -> torch.Tensor:
        """So many numbers of any value, the same memory as last time if that is large enough."""
        found = self._kept.get(name)
        if found is None or found.numel() < numbers:
            found = self._kept[name] = torch.empty(numbers, dtype=self._dtype)
        return found[:numbers]

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def drop(self) -> None:
        """Forgets the rows of a step that was given up."""
        self._count = 0
        self.clear()

    def reduce(self, counts: Sequence[int], order: Sequence[int]) -> torch.Tensor:
        """Sets the gradients to the ordered sum of all rows, `counts[r]` of which are rank r's; returns the extras.

        `order`: the ranks in the order of their rows. Gradients and extras stand until the next sum.

        Raises RuntimeError when a peer fails, ValueError when this rank added another number of rows.
        """
        rank, size = dist.get_rank(), len(counts)
        if self._count != counts[rank]:
            raise ValueError(f"rank {rank} added {self._count} rows of gradients, expected {counts[rank]}")
        width = -(-self._length // size)
        sent = self._memory("nothing", 0)
        if self._count:
            sent = self._rows[:, : self._count].reshape(-1)  # a copy only if there was room for more rows
        received = self._memory("received", sum(counts) * width)
        taken, given = [count * width for count in counts], [counts[rank] * width] * size
        self._group.wait(dist.all_to_all_single(received, sent, taken, given, async_op=True))
        by_rank = torch.split(received.view(sum(counts), width), list(counts))
        pieces = [piece for other in order for piece in by_rank[other]]
        total = self._memory("total", width)
        total.copy_(pieces[0]) if pieces else total.zero_()
        for piece in pieces[1:]:
            total += piece
        summed = self._memory("summed", size * width)
        self._group.wait(dist.all_gather_single(summed, total, async_op=True))
        self._count = 0
        return self._give(summed[: self._length])

    def _give(self, flat: torch.Tensor) -> torch.Tensor:
        at = 0
        for parameter in self._parameters:
            size = parameter.numel()
            parameter.grad = flat[at : at + size].view_as(parameter).to(parameter.device, parameter.dtype)
            at += size
        return flat[at:]


class OrderedExchange:
    """Sums a step's gradients shard by shard: the weights are equal in every bit for any number of members.

    `width`: numbers beside the gradients. `loss_word`: the word that comes back as the sum of the pieces' losses times
    their records, added in the order of the shards like everything else.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], group: GlooGroup, width: int, *, loss_word: int
    ) -> None:
        self._group, self._loss_word = group, loss_word
        self._rows = OrderedSum(parameters, group, width + 1)
        device = parameters[0].device if parameters else torch.device("cpu")
        self.beside = torch.zeros(width, device=device)
        self.syncing = True
        self.broken: RuntimeError | None = None
        self.on_computed: Callable[[], None] = lambda: None
        self.on_sent: Callable[[], None] = lambda: None

    def attach(self, words: int) -> None:
        self._rows.enter()

    def begin(self) -> None:
        self._rows.drop()
        self.beside.zero_()

    def add(self, piece: Piece) -> None:
        (piece.scaled * piece.weight).backward()  # type: ignore[no-untyped-call]
        self.on_computed()
        self._rows.add(torch.cat([self.beside.cpu(), torch.tensor([piece.loss.item() * piece.count])]))
        self.beside.zero_()

    def reduce(self, piece: Piece | None, words: list[float], shares: Shares) -> tuple[list[float], torch.Tensor]:
        if piece is not None:
            self.add(piece)
        self.on_computed()
        row = torch.tensor(words, dtype=torch.float64)
        underway = self._group.summed(row)
        self.on_sent()
        self._group.wait(underway)
        summed = self._rows.reduce(shares.counts, shares.order).float()
        row[self._loss_word] = summed[-1]
        return row.tolist(), summed[:-1]

    def detach(self) -> None:
        """Keeps what it has: `attach` begins anew."""
