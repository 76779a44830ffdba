"""The rows' gradients beside the all-reduce of a step.

    all-reduce of the dense gradients ──▶ push of this member's rows, acknowledged by every server ──▶ all have pushed

When `reduce` returns, every server has all parts of the step, so a step that a worker applies is applied on the
servers. The other way round is not so: a death may end the group after the servers have the step. Survivors then repeat
it; servers that have it ignore the parts, the others put them in the place of those of the attempt before.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from trueline.parallel.exchange import BackwardPiece, GradientExchange, Shares
from trueline.ps.client import Gradients, PsClient
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
    ) -> None:
        self._inner, self._group, self._at = inner, group, at
        self._tables, self._link, self._connect = tables, link, connect
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
            self._push(account)
            self._meet()
        self._tables.drop()
        return sums, beside

    def detach(self) -> None:
        self._tables.drop()
        self._inner.detach()

    def _pull(self, wanted: dict[str, Ids]) -> Mapping[str, Rows]:
        assert self._client is not None
        return self._client.pull(wanted, dense=False).rows

    def _push(self, account: StepAccount) -> None:
        assert self._client is not None
        weighs = account.weight != account.count and account.weight > 0  # as `Replica.apply`
        rows = self._tables.take_gradients(account.count / account.weight if weighs else 1.0)
        step, group = self._at(), self._group
        self._client.push(Gradients(
            epoch=0, minibatch=step, weight=1.0 if rows else 0.0, lrs=self._tables.lrs, tables=rows, dense={},
            pulled=dict.fromkeys(self._client.routing.servers, step), part=group.rank, parts=group.size,
            attempt=group.generation + 1,
        ))  # fmt: skip
        self._client.drain()
        self._client.take_acknowledged()

    def _meet(self) -> None:
        """Returns when every member of the group has called it. Raises RuntimeError when a peer fails."""
        members: Sequence[str] = self._group.view.members
        if len(members) > 1:
            gloo = self._group.process_group
            gloo.wait(gloo.sum_on_host(torch.zeros(1)))
