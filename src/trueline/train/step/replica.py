"""One worker's copy of the job's state, and what it contributes to a step.

Beside its gradients a worker contributes the words of its step account, a tally of its records, and the changes of
running statistics; the gradient exchange sums them together. A piece with n of a step's B records weighs its mean loss
with n/B, whatever the split; sums and means by other weights: `reduction.py`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueline.checkpoint.change_watch import ChangeWatch, changes_by_operators
from trueline.checkpoint.checkpoint import expect_holdable
from trueline.checkpoint.snapshot import Snapshot
from trueline.errors import UsageError
from trueline.parallel.ddp import DdpExchange, list_used
from trueline.parallel.exchange import BackwardPiece, GradientExchange, Shares, unused_parameters
from trueline.parallel.finite import are_finite, describe_infinite, have_finite_sums
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.ordered import OrderedExchange
from trueline.train import dynamo
from trueline.train.job_dir import current_job
from trueline.train.step import model_traits
from trueline.train.step.ledger import Ledger, LeftOut, StepAccount
from trueline.train.step.model_traits import BufferSlot, ModelTraits
from trueline.train.step.optimizer_step import OptimizerStep
from trueline.train.step.options import Options
from trueline.train.step.plan import Ints
from trueline.train.step.reduction import Share, zero_loss

TALLY_BYTES = 64 << 10
"""Records are tallied one by one if their counters are no larger than this, or than 2 % of the parameters."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of a step's all-reduce, kept by a member that cannot apply it yet."""

    account: StepAccount
    beside: torch.Tensor
    gradients: list[torch.Tensor | None]


class Replica:
    """Model, optimizer step and ledger, and the exchange that sums the model's gradients."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_step: OptimizerStep,
        group: GlooGroup,
        num_records: int,
        options: Options,
    ) -> None:
        self.model, self.optimizer_step, self.options, self._group = model, optimizer_step, options, group
        tallied = 4 * num_records <= max(TALLY_BYTES, sum(value.nbytes for value in model.parameters()) // 50)
        self.ledger = Ledger(num_records=num_records, tally=np.zeros(num_records, np.int32) if tallied else None)
        self._running = model_traits.running_statistics(model)
        self._counters = model_traits.batch_counters(model)
        self._tallied = num_records if tallied else 0
        self._parameters = [value for value in model.parameters() if value.requires_grad]
        self._frozen = [value for value in model.parameters() if not value.requires_grad]
        self._groups = len(optimizer_step.optimizer.param_groups)
        self._width = self._tallied + sum(value.numel() for value in self._running)
        self._before: list[torch.Tensor] = []
        self._buffers: list[BufferSlot] = []
        self._buffers_before: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of each, its tensor and a copy of its content."""
        self._beside_state: list[BufferSlot] = []
        """Of these the ones that `model.state_dict()` leaves out."""
        self._versions: list[int] = []
        self._gathered: list[torch.Tensor | None] = []
        """Between two pieces of a step: the gradients so far, out of reach of a loop that clears or clips them."""
        self._snapshots: list[Snapshot] = []
        self.owned = optimizer_step.owned
        """Whether nothing but the optimizer's step changes parameters: the loop is not a user's own."""
        optimizer_step.before_change = self.settle
        optimizer_step.change = self._watch_change
        if options.compile:
            model.forward = torch.compile(model.forward)
        self.exchange: GradientExchange
        if options.bitwise:
            self.exchange = OrderedExchange(self._parameters, group, self._width, loss_word=StepAccount.LOSS_WORD)
        else:
            self.exchange = DdpExchange(model, group, self._width)
        self._summed = self.exchange.beside

    def take_traits(self, traits: ModelTraits) -> None:
        """Exchanges what forwards add to buffers, as for running statistics, and sums gradients in half precision shard
        by shard: a rounded gradient is no sum of those of its parts. Before the first `attach`. Raises CheckpointError
        for a state that a job could not keep."""
        if current_job() is not None:
            expect_holdable(self.state())
        if traits.skips:
            self.options = replace(self.options, find_unused_parameters=True)
        if traits.half and type(self.exchange) is DdpExchange:
            self._order_sums(self.exchange)
        if names := traits.buffers:
            kinds = [model_traits.buffer_slots(self.model, persistent=kind) for kind in (True, False)]
            self._buffers, self._beside_state = ([slot for slot in kind if slot.name in names] for kind in kinds)
            self._buffers = self._buffers + self._beside_state
            self.exchange.width += sum(slot.change(slot.value).numel() for slot in self._buffers)

    def _order_sums(self, former: DdpExchange) -> None:
        self.model.forward = former.original
        ordered = OrderedExchange(self._parameters, self._group, former.width, loss_word=StepAccount.LOSS_WORD)
        ordered.on_begin, ordered.on_computed, ordered.on_sent = former.on_begin, former.on_computed, former.on_sent
        self.exchange, self._summed = ordered, ordered.beside

    def attach(self, size: int) -> None:
        """Joins the process group of `size` members that was just formed."""
        self.exchange.attach(StepAccount.num_words(size) + self.optimizer_step.settings.width)

    def detach(self) -> None:
        """Leaves the group, and takes the running statistics of the last applied step again."""
        self.exchange.detach()
        self.reset_buffers()
        self.optimizer_step.zero_grad()  # gradients lie in the memory of the group's buckets

    def begin(self) -> None:
        """Begins a step: no gradients, no contributions; running statistics are those of the last applied step."""
        self.reset_buffers()
        self.optimizer_step.begin()
        self._gathered, self._versions = [], self._read_versions()
        self.exchange.beside.zero_()
        self.exchange.on_begin()
        if self._running or self._counters:
            self._before = [value.clone() for value in (*self._running, *self._counters)]
        self._buffers_before = [(slot.value, slot.value.clone()) for slot in self._buffers]

    def add(self, loss: torch.Tensor, weight: float, records: Ints, share: Share | None = None) -> None:
        """Runs the backward of a piece that is not the last; nothing leaves this process."""
        self._return_gradients()
        self.exchange.add(self._piece(loss, weight, records, share))
        self._gathered = [value.grad for value in self._parameters]
        for value in self._parameters:
            value.grad = None
        self.reset_buffers()

    def reduce(
        self, piece: tuple[torch.Tensor, float, Ints, Share] | None, account: StepAccount, shares: Shares
    ) -> StepAccount:
        """Runs the last piece's backward, if any; returns the members' sum. Raises RuntimeError when a peer fails."""
        last = None if piece is None else self._piece(*piece)
        self._return_gradients()
        summed, self._summed = self.exchange.reduce(last, account.pack(), shares)
        self.reset_buffers()
        return StepAccount.unpack(summed, settings=self.optimizer_step.settings.width)

    def is_finite(self) -> bool:
        """Whether the sums of the last `reduce` are finite. In fp16 the scaler looks at the gradients."""
        scaled = self.optimizer_step.scaler.is_enabled()
        if not scaled and self.exchange.sums and have_finite_sums(self.exchange.sums):
            return True
        gradients = [] if scaled else [value.grad for value in self._parameters if value.grad is not None]
        return are_finite([self._summed, *gradients])

    def describe_infinite(self) -> str:
        """What of the gradients of this process's last backward is not finite; empty: all are."""
        return describe_infinite(self.model, [value.grad for value in self._parameters])

    def _read_versions(self) -> list[int]:
        return [] if self.owned else [value._version for value in self._parameters]

    def expect_own_changes(self) -> None:
        """Raises UsageError if the loop has changed parameters: a worker that catches up would not."""
        if not self.owned and self._versions != self._read_versions():
            raise UsageError(
                f"the loop changes parameters itself before step {self.ledger.steps}",
                hint="a worker that joins applies the steps that it missed, and no line of the loop: do it in the "
                "step() of an optimizer of your own",
            )

    def _expect_same_training(self) -> None:
        """Raises UsageError if the loop has frozen or thawed parameters, or changed the optimizer's groups."""
        where = f"step {self.ledger.steps}"
        model_traits.expect_same_training(self._parameters, self._frozen, where)
        if len(self.optimizer_step.optimizer.param_groups) != self._groups:
            raise UsageError(
                f"the loop changes the parameter groups of the optimizer in step {self.ledger.steps}",
                hint="give it all groups at the beginning, with a learning rate of 0 until they count: computed from "
                "batch.step before job.step(loss)",
            )

    def _return_gradients(self) -> None:
        """Raises UsageError if the loop has computed some itself."""
        if not self.owned:
            self._expect_same_training()
        if any(value.grad is not None for value in self._parameters):
            raise UsageError(
                f"the loop computes gradients itself in step {self.ledger.steps}",
                hint="job.step(loss) runs backward and optimizer",
            )
        for value, gathered in zip(self._parameters, self._gathered, strict=False):
            value.grad = gathered
        self._gathered = []

    def _piece(self, loss: torch.Tensor, weight: float, records: Ints, share: Share | None = None) -> BackwardPiece:
        """Enters the records, and their changes of the running statistics, beside the gradients."""
        share = share or Share(weight, len(records), len(records))
        if not share.weight:
            loss = zero_loss(list_used(loss, self._parameters))
        beside = self.exchange.beside
        if self._tallied and beside.is_cpu:
            beside.numpy()[records] += 1.0  # takes a fraction of the time of torch's own indexing
        elif self._tallied:
            beside[torch.from_numpy(records)] += 1.0
        at = self._tallied
        for value, before in zip(self._running, self._before, strict=False):
            beside[at : at + value.numel()] += weight * (value - before).flatten()
            at += value.numel()
        for slot, (_, content) in zip(self._buffers, self._buffers_before, strict=True):
            change = slot.change(content)
            beside[at : at + len(change)] += (weight * change).to(beside.device, beside.dtype)
            at += len(change)
        return BackwardPiece(loss, self.optimizer_step.scale_loss(loss), share.gradient, share.loss)

    def reset_buffers(self) -> None:
        """Gives each piece the same running statistics and buffers; only after its backward, which may rerun the
        forward, or where its forward counts for nothing."""
        for slot, (value, content) in zip(self._buffers, self._buffers_before, strict=False):
            slot.set(value, content)
        if not self._before:
            return
        for value, before in zip((*self._running, *self._counters), self._before, strict=False):
            value.copy_(before)

    def check_all_used(self) -> None:
        """Raises RecipeError if parameters took no part in a recipe's first step, which is seldom meant."""
        if self.ledger.steps or not self.owned or self.options.find_unused_parameters:
            return
        named = self.model.named_parameters()
        if unused := [name for name, value in named if value.requires_grad and value.grad is None]:
            raise unused_parameters(unused)

    def keep(self, account: StepAccount, *, copied: bool = True) -> Reduced:
        """The sums of the last `reduce`, which are valid until the next one unless they are copied."""
        if not copied:
            return Reduced(account, self._summed, [value.grad for value in self._parameters])
        gradients = [None if value.grad is None else value.grad.clone() for value in self._parameters]
        return Reduced(account, self._summed.clone(), gradients)

    def recall(self, reduced: Reduced) -> None:
        """Takes `reduced` as the sums of the last `reduce`."""
        self._summed = reduced.beside
        for parameter, gradient in zip(self._parameters, reduced.gradients, strict=True):
            parameter.grad = gradient

    def apply(self, account: StepAccount, measured: float | None = None, *, left_out: LeftOut | None = None) -> bool:
        """Applies the step; False if its gradients overflowed, so that only their scale has changed.

        `measured`: the monitored value of the current state, if it was evaluated. `left_out`: what was set aside.
        Raises UsageError, and changes nothing, if members have set the optimizer's settings differently.
        """
        self.optimizer_step.settings.take(account.settings, self.ledger.steps)
        if account.weight != account.count and account.weight > 0:  # a mean by weights: the pieces were scaled by them
            gradients = [value.grad for value in self._parameters if value.grad is not None]
            torch._foreach_mul_(gradients, account.count / account.weight)
        if not self.optimizer_step.apply(measured, steps=self.ledger.steps):
            return False
        at = self._tallied
        self._before = []
        if self._running or self._counters:
            with torch.no_grad():
                for value in self._running:
                    value += self._summed[at : at + value.numel()].view_as(value).to(value.device)
                    at += value.numel()
                for counter in self._counters:
                    counter += 1
        for slot, (value, content) in zip(self._buffers, self._buffers_before, strict=False):
            size = slot.change(content).numel()
            slot.set(value, content, self._summed[at : at + size].double())
            at += size
        self._buffers_before = []
        self._versions = self._read_versions()
        tally = np.rint(self._summed[: self._tallied].cpu().numpy()).astype(np.int32) if self._tallied else None
        self.ledger.apply(account, tally, left_out)
        return True

    def state(self) -> dict[str, Any]:
        """The whole state; its tensors are the live ones."""
        beside = {slot.name: slot.value for slot in self._beside_state}
        return {
            "model": self.model.state_dict(), **({"buffers": beside} if beside else {}),
            **self.optimizer_step.state(), "ledger": self.ledger.as_tree(),
        }  # fmt: skip

    def snapshot(self, *, readers: int = 1, patience: float = 0.0, spill: Path | None = None) -> Snapshot:
        """The whole state as it is now, for threads that read it while training continues."""
        stable = self.optimizer_step.stable_memory() if self.owned else frozenset[int]()
        snapshot = Snapshot(
            self.state(),
            readers=readers,
            patience=patience,
            spill=spill,
            live=lambda tensor: tensor.data_ptr() in stable,
        )
        self._snapshots.append(snapshot)
        return snapshot

    def settle(self) -> None:
        """Copies what readers of snapshots have not read yet: the state is about to change."""
        snapshots, self._snapshots = self._snapshots, []
        for snapshot in snapshots:
            snapshot.settle()
            self.owned = self.owned and not snapshot.torn  # something else changes parameters: copy at once from now on

    def _watch_change(self) -> AbstractContextManager[None]:
        """Around an optimizer's step: what it changes is settled tensor by tensor where readers are on the way."""
        return self._settle_changes() if self._snapshots else nullcontext()

    @contextmanager
    def _settle_changes(self) -> Iterator[None]:
        shows = changes_by_operators(self.optimizer_step.optimizer)
        shows = shows and not dynamo.is_loaded()  # what is compiled shows no operators
        watched = [one for one in self._snapshots if one.can_wait() and shows]
        self._snapshots = [one for one in self._snapshots if one not in watched]
        self.settle()
        if not watched:
            yield
            return
        for snapshot in watched:
            snapshot.begin_change()

        def release(address: int) -> None:
            for snapshot in watched:
                snapshot.release(address)

        try:
            with ChangeWatch(release):
                yield
        finally:
            for snapshot in watched:
                snapshot.end_change()
                self.owned = self.owned and not snapshot.torn
            self._snapshots += watched  # what was not changed is settled before the next step

    def restore(self, state: dict[str, Any]) -> None:
        self.settle()
        self._before, self._buffers_before = [], []
        self.model.load_state_dict(state["model"])
        for slot in self._beside_state:
            slot.set(slot.value, state.get("buffers", {}).get(slot.name, slot.value))
        self.optimizer_step.restore(state)
        self.ledger = Ledger.from_tree(state["ledger"])
        self.begin()
