"""Sums of shards' gradients that are bitwise independent of the number of workers.

Floating-point addition is not associative, so each shard's gradient is a row, and rows are added in shard order:

    rank r: rows of its shards ──all-to-all──▶ piece r of every row ──add in order──▶ piece r of the sum ──all-gather──▶

Members of one host read the pieces where they lie (`local_sums.py`); gloo carries them elsewhere. Each rank sends
rows / workers + 1 gradients' worth of data; an all-reduce sends about two. Rows lie in host memory.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from trueline.parallel.exchange import BackwardPiece, Shares, drop_unused
from trueline.parallel.gloo import GlooGroup


class OrderedSum:
    """Rows of gradients with `extra` numbers beside each. Memory is kept: allocating takes as long as adding."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: GlooGroup, extra: int) -> None:
        self._group = group
        self._parameters = list(parameters)
        wide = any(parameter.dtype == torch.float64 for parameter in self._parameters)
        self._dtype = torch.float64 if wide else torch.float32
        self._length = sum(parameter.numel() for parameter in self._parameters) + extra + len(self._parameters)
        self._buffers: dict[str, torch.Tensor] = {}
        self._rows = torch.empty(0)
        """[ranks, row capacity, width]: piece r of every row lies together, as it is sent."""
        self._count = 0

    def reset(self) -> None:
        """Starts without rows in new memory: an operation of the last group may still write into the old."""
        self._buffers, self._rows, self._count = {}, torch.empty(0), 0
        self._clear_gradients()

    def add(self, extra: torch.Tensor) -> None:
        """Moves the current gradients into a row, with `extra` and which parameters have one beside them."""
        size = dist.get_world_size()
        width = -(-self._length // size)
        found = ((value, value.grad) for value in self._parameters)
        gradients = (torch.zeros_like(value) if grad is None else grad.to_dense() for value, grad in found)
        used = torch.tensor([float(value.grad is not None) for value in self._parameters])
        if self._rows.numel() == 0 or self._count == self._rows.shape[1]:
            longer = torch.empty(size, self._count + 1, width, dtype=self._dtype)
            longer[:, : self._count] = self._rows if self._count else 0.0
            self._rows = longer
        row, at = self._rows[:, self._count], 0
        for value in (*gradients, extra, used, torch.zeros(size * width - self._length)):
            flat = value.reshape(-1)
            while len(flat):
                piece, start = divmod(at, width)
                part = row[piece, start : start + len(flat)]
                part.copy_(flat[: len(part)])
                flat, at = flat[len(part) :], at + len(part)
        self._count += 1
        self._clear_gradients()

    def _buffer(self, name: str, numbers: int) -> torch.Tensor:
        """[numbers] Uninitialized; the same memory as last time if that is large enough."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numbers:
            buffer = self._buffers[name] = torch.empty(numbers, dtype=self._dtype)
        return buffer[:numbers]

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self, counts: Sequence[int], order: Sequence[int]) -> torch.Tensor:
        """Sets the gradients to the ordered sum of all rows, `counts[r]` of them from rank r; returns the extras' sum.

        `order`: the ranks in the order of their rows. Gradients and extras are valid until the next `reduce`.
        Raises RuntimeError when a peer fails, ValueError when this rank added another number of rows.
        """
        rank, size = dist.get_rank(), len(counts)
        if self._count != counts[rank]:
            raise ValueError(f"rank {rank} added {self._count} rows of gradients, expected {counts[rank]}")
        width = -(-self._length // size)
        sent = self._buffer("nothing", 0)
        if self._count:
            sent = self._rows[:, : self._count].reshape(-1)  # copies only if the capacity is larger
        summed = self._buffer("summed", size * width)
        operation = self._group.sum_rows(sent, counts, order, summed)
        if operation is None:
            self._sum_by_gloo(sent, counts, order, summed)
        else:
            self._group.wait(operation)
        self._count = 0
        flat, at = summed[: self._length], 0
        for parameter in self._parameters:
            size = parameter.numel()
            parameter.grad = flat[at : at + size].view_as(parameter).to(parameter.device, parameter.dtype)
            at += size
        end = len(flat) - len(self._parameters)
        drop_unused(self._parameters, flat[end:])
        return flat[at:end]

    def _sum_by_gloo(
        self, sent: torch.Tensor, counts: Sequence[int], order: Sequence[int], summed: torch.Tensor
    ) -> None:
        rank, size = dist.get_rank(), len(counts)
        width = len(summed) // size
        received = self._buffer("received", sum(counts) * width)
        out_sizes, in_sizes = [count * width for count in counts], [counts[rank] * width] * size
        self._group.wait(dist.all_to_all_single(received, sent, out_sizes, in_sizes, async_op=True))
        by_rank = torch.split(received.view(sum(counts), width), list(counts))
        pieces = [piece for other in order for piece in by_rank[other]]
        total = self._buffer("total", width)
        total.copy_(pieces[0]) if pieces else total.zero_()
        for piece in pieces[1:]:
            total += piece
        self._group.wait(dist.all_gather_single(summed, total, async_op=True))


class OrderedExchange:
    """Sums a step's gradients shard by shard, so that weights are bitwise equal for any number of members.

    `width`: numbers beside the gradients. `loss_word`: the index of the word that `reduce` replaces by the sum of loss
    times records over all pieces, added in the order of the shards.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], group: GlooGroup, width: int, *, loss_word: int
    ) -> None:
        self._group, self._loss_word, self.width = group, loss_word, width
        self._parameters = parameters
        self._rows = OrderedSum(parameters, group, width + 1)
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self.beside = torch.zeros(width, device=self._device)
        self.syncing = True
        self.broken: RuntimeError | None = None
        self.on_begin: Callable[[], None] = lambda: None
        self.on_computed: Callable[[], None] = lambda: None
        self.on_sent: Callable[[], None] = lambda: None
        self.sums: Sequence[torch.Tensor] = ()

    def attach(self, words: int) -> None:
        if len(self.beside) != self.width:
            self._rows = OrderedSum(self._parameters, self._group, self.width + 1)
            self.beside = torch.zeros(self.width, device=self._device)
        self._rows.reset()

    def add(self, piece: BackwardPiece) -> None:
        (piece.scaled * piece.weight).backward()  # type: ignore[no-untyped-call]
        self.on_computed()
        self._rows.add(torch.cat([self.beside.cpu(), torch.tensor([piece.loss.item() * piece.count])]))
        self.beside.zero_()

    def reduce(
        self, piece: BackwardPiece | None, words: list[float], shares: Shares
    ) -> tuple[list[float], torch.Tensor]:
        if piece is not None:
            self.add(piece)
        self.on_computed()
        row = torch.tensor(words, dtype=torch.float64)
        operation = self._group.sum_on_host(row)
        self.on_sent()
        self._group.wait(operation)
        summed = self._rows.reduce(shares.counts, shares.order).float()
        sums: list[float] = row.tolist()
        sums[self._loss_word] = summed[-1].item()
        return sums, summed[:-1]

    def detach(self) -> None:
        """Nothing to undo: `attach` resets the rows."""
