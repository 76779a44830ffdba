"""The rows' gradients beside the all-reduce of a step.

    all-reduce of the dense gradients ──▶ push of this member's rows, acknowledged by every server ──▶ all have pushed

With `clip_norm` the servers keep the parts, rank 0 asks them for the squares of the rows' gradients, and pushes the
factor as the last part of the step: the norm is that of dense gradients and rows together.

When `reduce` returns, every server has all parts of the step, so a step that a worker applies is applied on the
servers. The other way round is not so: a death may end the group after the servers have the step. Survivors then repeat
it; servers that have it ignore the parts, the others put them in the place of those of the attempt before.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from trueline.errors import TrainError, TruelineError
from trueline.parallel.exchange import BackwardPiece, GradientExchange, Shares
from trueline.ps.client import PsClient
from trueline.ps.gradients import Gradients
from trueline.ps.hybrid.calls import HybridLink
from trueline.ps.hybrid.rows import HybridTables
from trueline.ps.messages import Routing
from trueline.ps.model.embedding import Rows
from trueline.ps.partition import Ids
from trueline.train.step.group import WorkerGroup
from trueline.train.step.ledger import StepAccount


class TableExchange:
    """A GradientExchange around `inner`; `at`: the group's step."""

    def __init__(
        self,
        inner: GradientExchange,
        group: WorkerGroup,
        at: Callable[[], int],
        *,
        tables: HybridTables,
        link: HybridLink,
        connect: Callable[[Routing], PsClient],
        clip_norm: float = 0.0,
    ) -> None:
        self._inner, self._group, self._at = inner, group, at
        self._tables, self._link, self._connect = tables, link, connect
        self._clip_norm = clip_norm
        self._client: PsClient | None = None
        self.on_begin: Callable[[], None] = tables.drop  # also what the trial of a record has looked up

    @property
    def width(self) -> int:
        return self._inner.width

    @width.setter
    def width(self, width: int) -> None:
        self._inner.width = width

    @property
    def beside(self) -> torch.Tensor:
        return self._inner.beside

    @beside.setter
    def beside(self, beside: torch.Tensor) -> None:
        self._inner.beside = beside

    @property
    def syncing(self) -> bool:
        return self._inner.syncing

    @syncing.setter
    def syncing(self, syncing: bool) -> None:
        self._inner.syncing = syncing

    @property
    def broken(self) -> RuntimeError | None:
        return self._inner.broken

    @broken.setter
    def broken(self, broken: RuntimeError | None) -> None:
        self._inner.broken = broken

    @property
    def on_computed(self) -> Callable[[], None]:
        return self._inner.on_computed

    @on_computed.setter
    def on_computed(self, act: Callable[[], None]) -> None:
        self._inner.on_computed = act

    @property
    def on_sent(self) -> Callable[[], None]:
        return self._inner.on_sent

    @on_sent.setter
    def on_sent(self, act: Callable[[], None]) -> None:
        self._inner.on_sent = act

    @property
    def sums(self) -> Sequence[torch.Tensor]:
        return ()  # the tables' gradients lie elsewhere

    def attach(self, words: int) -> None:
        self._inner.attach(words)
        self._tables.drop()
        if self._client is None:
            self._client = self._connect(self._link.open(self._tables.spec))
            self._tables.pull = self._pull
        if self._group.rank == 0:
            self._link.align(self._at())
            self._client.initialize({})
        self._meet()

    def add(self, piece: BackwardPiece) -> None:
        self._inner.add(piece)

    def reduce(
        self, piece: BackwardPiece | None, words: list[float], shares: Shares
    ) -> tuple[list[float], torch.Tensor]:
        sums, beside = self._inner.reduce(piece, words, shares)
        account = StepAccount.unpack(sums)
        if math.isfinite(account.loss):  # else no member applies the step
            weighs = account.weight != account.count and account.weight > 0  # as `Replica.apply`
            factor = account.count / account.weight if weighs else 1.0
            rows = self._tables.take_gradients(factor)
            self._push(rows)
            self._meet()
            if self._clip_norm:
                self._clip(factor)
        self._tables.drop()
        return sums, beside

    def detach(self) -> None:
        self._tables.drop()
        self._inner.detach()

    def _pull(self, wanted: dict[str, Ids], averaged: bool) -> Mapping[str, Rows]:
        assert self._client is not None
        return self._client.pull(wanted, dense=False, averaged=averaged).rows

    def _push(self, rows: Mapping[str, tuple[Ids, Rows]], *, scale: float = 0.0) -> None:
        """This member's part of the step; with `scale` the last one, of rank 0."""
        assert self._client is not None
        step, group = self._at(), self._group
        self._client.push(Gradients(
            epoch=0, minibatch=step, weight=1.0 if rows else 0.0, lrs=self._tables.lrs, tables=rows, dense={},
            pulled=dict.fromkeys(self._client.routing.servers, step), part=group.size if scale else group.rank,
            parts=group.size + bool(self._clip_norm), attempt=group.generation + 1, scale=scale,
        ))  # fmt: skip
        try:
            self._client.drain()
        except TruelineError as error:  # a gradient that is NaN
            raise type(error)(error.message, hint=f"in step {step}; {error.hint}") from error
        self._client.take_acknowledged()

    def _clip(self, factor: float) -> None:
        """Scales the gradients of the step to `clip_norm`. `factor`: what the dense ones will be multiplied by."""
        dense = [one.grad for one in self._tables.parameters if one.grad is not None]
        scale = 0.0
        if self._group.rank == 0:
            assert self._client is not None
            flat = [one.coalesce().values() if one.is_sparse else one for one in dense]
            own = float(torch.nn.utils.get_total_norm(flat)) * factor if flat else 0.0
            norm = math.hypot(own, math.sqrt(self._client.sum_squares(0, self._at())))
            scale = min(1.0, self._clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            if math.isfinite(norm):
                self._push({}, scale=scale)
        scale = self._meet(scale)
        if not scale > 0.0:
            raise TrainError(
                "the norm of the gradients is not finite, though the loss is",
                hint="look for square roots, logarithms and divisions near zero in the model and the loss",
            )
        if scale < 1.0:
            for one in dense:
                one.mul_(scale)

    def _meet(self, value: float = 0.0) -> float:
        """Returns when every member of the group has called it: the sum of the values. Raises RuntimeError when a peer
        fails."""
        members: Sequence[str] = self._group.view.members
        total = torch.tensor([value], dtype=torch.float64)
        if len(members) > 1:
            gloo = self._group.process_group
            gloo.wait(gloo.sum_on_host(total))
        return float(total)
