"""Sums of shards' gradients whose every bit is independent of the number of workers.

Floating-point addition is not associative, so an allreduce over another number of workers gives other last bits. Here
the gradient of each shard is a row of its own and the rows are added in the order of the shards, whoever holds them:

    rank r: rows of its shards ──all-to-all──▶ piece r of every row ──add in order──▶ piece r of the sum ──all-gather──▶

Each rank sends its rows once and the sum once: rows / workers + 1 gradients' worth, where an allreduce sends about two.
Rows lie in host memory, also those of a model on a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trueline.train.group import GlooGroup


class OrderedSum:
    """Rows of `parameters`' gradients with `extra` numbers beside each."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: GlooGroup, extra: int) -> None:
        self._group = group
        self._parameters = list(parameters)
        wide = any(parameter.dtype == torch.float64 for parameter in self._parameters)
        self._dtype = torch.float64 if wide else torch.float32
        self._extra = extra
        self._length = sum(parameter.numel() for parameter in self._parameters) + extra
        self._rows: list[torch.Tensor] = []

    def add(self, extra: torch.Tensor) -> None:
        """Makes a row of the gradients at hand, and takes them away."""
        flat = [
            (torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten()).to(
                "cpu", self._dtype
            )
            for parameter in self._parameters
        ]
        self._rows.append(torch.cat([*flat, extra.to("cpu", self._dtype)]))
        self.clear()

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def drop(self) -> None:
        """Forgets the rows of a step that was given up."""
        self._rows.clear()
        self.clear()

    def reduce(self, counts: Sequence[int], order: Sequence[int]) -> torch.Tensor:
        """Sets the gradients to the ordered sum of all rows, `counts[r]` of which are rank r's; returns the extras.

        `order`: the ranks in the order of their rows.

        Raises RuntimeError when a peer fails.
        """
        rank, size = dist.get_rank(), len(counts)
        width = -(-self._length // size)
        rows = torch.zeros(counts[rank], size, width, dtype=self._dtype)
        for row, padded in zip(self._rows, rows, strict=True):
            padded.view(-1)[: self._length] = row
        sent = rows.transpose(0, 1).contiguous().view(-1)
        received = torch.empty(sum(counts) * width, dtype=self._dtype)
        taken, given = [count * width for count in counts], [counts[rank] * width] * size
        self._group.wait(dist.all_to_all_single(received, sent, taken, given, async_op=True))
        by_rank = torch.split(received.view(sum(counts), width), list(counts))
        pieces = [piece for other in order for piece in by_rank[other]]
        total = pieces[0].clone() if pieces else torch.zeros(width, dtype=self._dtype)
        for piece in pieces[1:]:
            total += piece
        summed = torch.empty(size * width, dtype=self._dtype)
        self._group.wait(dist.all_gather_into_tensor(summed, total, async_op=True))
        self._rows.clear()
        return self._give(summed[: self._length])

    def _give(self, flat: torch.Tensor) -> torch.Tensor:
        at = 0
        for parameter in self._parameters:
            size = parameter.numel()
            parameter.grad = flat[at : at + size].view_as(parameter).to(parameter.device, parameter.dtype)
            at += size
        return flat[at:]
