"""One worker's copy of the job's state, and the gradients' way through the group.

The user's model is wrapped in torch's DistributedDataParallel (bucketed, overlapped with backward) together with one
more parameter, the words, whose gradient is what this worker contributes to the step beside its gradients:

    [ words of the ledger | one slot for each rank's rate | tally of records | changes of running statistics ]

So the account of a step travels in the very allreduce that carries its gradients and costs no round trip. A step may
take several forwards (pieces); only the last backward is reduced. In bit-for-bit mode the pieces' gradients go through
`ordered.py` instead. Gradients are weighted by records: with n of a step's B records in a piece, its mean loss counts
n/B, whatever the split.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from trueline.checkpoint import tree
from trueline.errors import RecipeError, join_names
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.ordered import OrderedSum
from trueline.train import devices
from trueline.train.step import ledger as books
from trueline.train.step import model_traits
from trueline.train.step.ledger import Ledger
from trueline.train.step.optimizer_step import Advance
from trueline.train.step.options import Options
from trueline.train.step.plan import Ints

TALLY_BYTES = 64 << 10
"""Records are tallied one by one when their counters are no larger than this, or than 2 % of the parameters."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a step's allreduce gave, kept by a member that cannot apply it yet."""

    words: list[float]
    beside: torch.Tensor
    gradients: list[torch.Tensor | None]


class _Replicated(torch.nn.Module):
    """What DDP sees: the model's own forward, and the words."""

    words: torch.nn.Parameter

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any], *, tie: bool) -> None:
        super().__init__()
        self.model = model
        self.instead: Sequence[torch.nn.Parameter] | None = None
        """Instead of a forward: a sum that gives these parameters gradients of zeros."""
        self._forward = forward
        self._tie = tie

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.instead is not None:
            flat = (value.reshape(-1)[:1] * 0.0 for value in self.instead)
            outputs = sum((value.sum().float() for value in flat), torch.zeros((), device=self.words.device))
        else:
            outputs = self._forward(*args, **kwargs)
        return (outputs, self.words * 1.0) if self._tie else outputs


class Replica:
    """Model, optimizer's side and ledger; `model(...)` goes through DDP in the last piece of a step."""

    def __init__(
        self,
        model: torch.nn.Module,
        advance: Advance,
        group: GlooGroup,
        num_records: int,
        options: Options,
        *,
        sharded: bool,
    ) -> None:
        self._group = group
        self.model, self.advance, self.options, self.sharded = model, advance, options, sharded
        tallied = _tallied(model, num_records)
        self.ledger = Ledger(num_records=num_records, tally=np.zeros(num_records, np.int32) if tallied else None)
        self.broken: RuntimeError | None = None
        self.syncing = True
        """Whether the next forward is that of the step's last piece."""
        self.on_computed: Callable[[], None] = lambda: None
        """Called when the local part of a backward is over, before it waits for peers."""
        self.on_sent: Callable[[], None] = lambda: None
        """Called after that, when all of a step is on its way to the peers: there is time for something else."""
        self._running = model_traits.running_statistics(model) if sharded else []
        self._counters = model_traits.batch_counters(model) if sharded else []
        self._tallied = num_records if tallied else 0
        self._parameters = [value for value in model.parameters() if value.requires_grad]
        width = self._tallied + sum(value.numel() for value in self._running)
        self._ordered = OrderedSum(self._parameters, group, width + 1) if options.bitwise else None
        self._device = devices.of_model(model)
        self._width = width
        self._contribution = self._beside = self._summed = torch.zeros(width, device=self._device)
        """This worker's contribution beside its gradients: the words, and after them the tally and the statistics."""
        self._line: npt.NDArray[np.float32] | None = None
        """The memory of the contribution, where that is the host's."""
        self._weight = torch.ones(())
        """The gradient of a loss, written anew for each step."""
        self._before: list[torch.Tensor] = []
        self._original = torch.compile(model.forward) if options.compile else model.forward
        self._inside = self._went = False
        self._sent: list[tuple[Any, torch.Tensor, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        """Buckets whose sums are under way: the operation, what it sums, where that belongs, what DDP was promised."""
        self._ddp: DistributedDataParallel | None = None
        self._replicated = _Replicated(model, self._original, tie=options.find_unused_parameters)
        model.forward = self._forward

    # The gradients' way. ---------------------------------------------------------------------------------------

    def attach(self, size: int) -> None:
        """Wraps the model for the process group of `size` members that was just formed."""
        quiet = {"forward_sync_buffers": False} if _NEW_BUFFERS else {"broadcast_buffers": False}
        self.broken = None
        if self._ordered is not None:
            self._ordered.enter()
            return
        self._contribution = torch.zeros(books.WORDS + size + self._width, device=self._device)
        self._beside = self._contribution[books.WORDS + size :]
        self._line = self._contribution.numpy() if self._contribution.is_cpu else None
        self._weight = torch.ones((), device=self._device)
        self._replicated.words = torch.nn.Parameter(torch.zeros_like(self._contribution))
        self._ddp = DistributedDataParallel(
            self._replicated,
            init_sync=False,
            find_unused_parameters=self.options.find_unused_parameters,
            gradient_as_bucket_view=True,  # spares a copy of every gradient; zero_grad sets to None
            **quiet,  # type: ignore[arg-type]
        )
        self._ddp.register_comm_hook(None, lambda _, bucket: self._send(bucket))

    def detach(self) -> None:
        """Forgets the group; DDP's hooks go with it, so that an old group never sees a new gradient.

        A step that failed was computed in vain: whoever is healed from this state takes that of the last applied step.
        """
        self._ddp = None
        self._take_back()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        through = self._ddp is not None and self.syncing and not self._inside and not self.broken
        if not through or not (self.model.training and torch.is_grad_enabled()):
            return self._original(*args, **kwargs)
        try:
            outputs = self._wrapped(*args, **kwargs)
            return outputs[0] if self.options.find_unused_parameters else outputs
        except RuntimeError as error:
            if not is_collective(error):
                raise _explained(error) from error
            self.broken = error
            return self._original(*args, **kwargs)

    def _wrapped(self, *args: Any, **kwargs: Any) -> Any:
        assert self._ddp is not None
        self._inside = self._went = True
        try:
            return self._ddp(*args, **kwargs)
        finally:
            self._inside = False

    def begin(self) -> None:
        """A step begins: no gradients, no contributions; the running statistics are those of the last applied step."""
        self._take_back()
        self.advance.zero_grad()
        self._went = False
        self._sent = []
        if self._ordered is not None:
            self._ordered.drop()
        elif self._ddp is not None:
            self._replicated.words.grad = None
        if self._width:
            self._beside.zero_()
        if self._running or self._counters:
            self._before = [value.clone() for value in (*self._running, *self._counters)]

    def add(self, loss: torch.Tensor, weight: float, records: Ints) -> None:
        """Backward of a piece that is not the last; nothing leaves this process."""
        self._note(weight, records)
        (self.advance.scaled(loss) * weight).backward()  # type: ignore[no-untyped-call]
        self.on_computed()
        self._take_back()
        if self._ordered is not None:
            self._row(loss, len(records))

    def reduce(
        self,
        piece: tuple[torch.Tensor, float, Ints] | None,
        words: list[float],
        shards: Sequence[int],
        order: Sequence[int],
    ) -> list[float]:
        """Backward of the last piece (loss, weight, records), if there is any, and the sum over all members.

        `words` are the ledger's and the rates; they come back summed. `shards`: how many shards each rank has in this
        step; `order`: ranks in the order of their shards. Raises RuntimeError when a peer fails.
        """
        if self._ordered is not None:
            return self._reduce_ordered(piece, words, shards, order)
        if piece is None:
            # a parameter that the others leave out stays without a gradient, whether or not somebody has no records
            zeros = self._zeros(() if self.options.find_unused_parameters else self._parameters)
            roots = [(zeros, torch.ones_like(zeros))]
        else:
            loss, weight, records = piece
            self._note(weight, records)
            scaled = self.advance.scaled(loss)
            roots = [(scaled, self._weighing(scaled, weight))]
            if not self._went:  # called in evaluation mode, or not as model(...): DDP does not know of the step
                zeros = self._zeros(self._parameters)
                roots.append((zeros, torch.ones_like(zeros)))
        self._enter(words)
        roots.append((self._replicated.words, self._contribution))
        _backward([pair for pair in roots if pair[0].requires_grad])
        self._take_back()
        gradient = self._replicated.words.grad
        assert gradient is not None
        if self._width:
            self._summed = gradient[len(words) :]
        found: list[float] = gradient.tolist() if not self._width else gradient[: len(words)].tolist()
        return found

    def _weighing(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """`weight` as the gradient of `loss`."""
        kept = self._weight
        if loss.shape == kept.shape and loss.dtype == kept.dtype and loss.device == kept.device:
            return kept.fill_(weight)
        return torch.full_like(loss, weight)

    def _reduce_ordered(
        self,
        piece: tuple[torch.Tensor, float, Ints] | None,
        words: list[float],
        shards: Sequence[int],
        order: Sequence[int],
    ) -> list[float]:
        assert self._ordered is not None
        if piece is not None:
            self.add(*piece)
        self.on_computed()
        row = torch.tensor(words, dtype=torch.float64)
        underway = self._group.summed(row)
        self.on_sent()
        self._group.wait(underway)
        summed = self._ordered.reduce(shards, order).float()
        self._summed = summed[:-1]
        found: list[float] = row.tolist()
        found[books.WORDS - 1] = summed[-1].item()  # the loss too in the order of the shards
        return found

    def _row(self, loss: torch.Tensor, count: int) -> None:
        assert self._ordered is not None
        self._ordered.add(torch.cat([self._beside.cpu(), torch.tensor([loss.item() * count])]))
        self._beside.zero_()

    def _zeros(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """What a member without records puts into the allreduce: zeros for `parameters`."""
        self._replicated.instead = parameters
        try:
            outputs = self._wrapped()
        finally:
            self._replicated.instead = None
        total: torch.Tensor = outputs[0] if self.options.find_unused_parameters else outputs
        return total

    def _send(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: the plain sum of a bucket (not the mean).

        A bucket on a device is summed there when the group has a plane, else in host memory; that copy waits for what
        computes the bucket, and for nothing else. The last bucket is the end of the local part of a backward: there
        all of them are waited for, as DDP would next. Raises RuntimeError when a peer fails.
        """
        gradients: torch.Tensor = bucket.buffer()
        summed = gradients if self._group.takes(gradients) else gradients.cpu()
        devices: list[int | str | torch.device] = [] if gradients.is_cpu else [gradients.device]
        promise: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._sent.append((self._group.bucket_summed(summed), summed, gradients, promise))
        if bucket.is_last():
            self.on_computed()
            self.on_sent()
            self._receive()
        return promise

    def _receive(self) -> None:
        """Waits for the sums of all buckets."""
        sent, self._sent = self._sent, []
        for begun, summed, gradients, promise in sent:
            self._group.wait_bucket(begun)
            if summed is not gradients:
                gradients.copy_(summed)
            promise.set_result(gradients)

    def _enter(self, words: list[float]) -> None:
        """Writes the words into this worker's contribution."""
        if self._line is not None:
            self._line[: len(words)] = words
        else:
            self._contribution[: len(words)] = torch.tensor(words)

    def _note(self, weight: float, records: Ints) -> None:
        """Enters a piece's records and what its forward did to the running statistics."""
        if self._tallied and self._beside.is_cpu:
            self._beside.numpy()[records] += 1.0  # a fraction of what torch's own indexing takes
        elif self._tallied:
            self._beside[torch.from_numpy(records)] += 1.0
        at = self._tallied
        for value, before in zip(self._running, self._before, strict=False):
            self._beside[at : at + value.numel()] += weight * (value - before).flatten()
            at += value.numel()

    def _take_back(self) -> None:
        """Each piece starts from the same running statistics. After the backward: a checkpointed forward runs again."""
        if not self._before:
            return
        for value, before in zip((*self._running, *self._counters), self._before, strict=False):
            value.copy_(before)

    def check_all_used(self) -> None:
        """Raises RecipeError when parameters took no part in the backward that has just ended."""
        named = self.model.named_parameters()
        unused = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        if unused and not self.options.find_unused_parameters:
            raise _unused(unused)

    def keep(self, words: list[float]) -> Reduced:
        """What was just reduced, as a copy."""
        gradients = [None if value.grad is None else value.grad.clone() for value in self._parameters]
        return Reduced(words, self._summed.clone(), gradients)

    def recall(self, reduced: Reduced) -> None:
        """As if `reduced` had just been reduced."""
        self._summed = reduced.beside
        for parameter, gradient in zip(self._parameters, reduced.gradients, strict=True):
            parameter.grad = gradient

    def apply(self, sums: books.Sums, measured: float | None = None, *, left_out: books.LeftOut | None = None) -> bool:
        """Applies the step; False when its gradients overflowed: nothing but their scale has changed.

        `left_out`: what of the step was set aside.
        `measured`: what an evaluation of the state at hand gave, if there was one.
        """
        if not self.advance.apply(measured, steps=self.ledger.steps):
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
        tally = np.rint(self._summed[: self._tallied].cpu().numpy()).astype(np.int32) if self._tallied else None
        self.ledger.apply(sums, tally, left_out)
        return True

    # The state's way. ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The whole state; its tensors are the live ones."""
        return {"model": self.model.state_dict(), **self.advance.state(), "ledger": self.ledger.as_tree()}

    def snapshot(self) -> dict[str, Any]:
        """The whole state, copied to host memory: a thread may send it while training goes on."""
        skeleton, tensors = tree.encode(self.state())
        copied: dict[str, Any] = tree.decode(skeleton, [tensor.to("cpu", copy=True) for tensor in tensors])
        return copied

    def restore(self, state: dict[str, Any]) -> None:
        """Takes `state` as its own."""
        self._before = []
        self.model.load_state_dict(state["model"])
        self.advance.restore(state)
        self.ledger = Ledger.from_tree(state["ledger"])
        self.begin()

    def averaged(self) -> AbstractContextManager[None]:
        return self.advance.averaged()


def _backward(roots: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """As torch.autograd.backward(tensors, gradients), without its comparison of their shapes, which are equal here."""
    tensors, gradients = zip(*roots, strict=True)
    Variable._execution_engine.run_backward(
        tensors, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


_NEW_BUFFERS = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters


def _tallied(model: torch.nn.Module, num_records: int) -> bool:
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return 4 * num_records <= max(TALLY_BYTES, parameters // 50)


def is_collective(error: RuntimeError) -> bool:
    """True when `error` came from the process group and not from the user's model."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return any(mark in text for mark in ("gloo", "Connection closed by peer", "Connection reset", "ProcessGroup"))


def _explained(error: RuntimeError) -> Exception:
    return _unused(()) if "Expected to have finished reduction" in str(error) else error


def _unused(names: Sequence[str]) -> RecipeError:
    which = f" ({join_names(names)})" if names else ""
    return RecipeError(
        f"some parameters of the model took no part in the loss of a step{which}",
        hint="set `find_unused_parameters = True` in the recipe, or use every parameter in every step",
    )
