"""All-reduce of gradients in buckets while the backward runs, by torch's DistributedDataParallel.

DDP wraps the model together with one more parameter, whose gradient is this member's other contribution: the words,
then the vector beside the gradients. They are summed in the all-reduce of the gradients, without a round trip of their
own. Of a step's several forwards (pieces) only the last backward is reduced.

Parameters that a step leaves out get zeros after its backward, so that DDP has all that it waits for, and each member
adds which ones it has used. Those that no member used are without a gradient, as in one process: weight decay and an
optimizer's momentum leave them alone.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from trueline.parallel.exchange import BackwardPiece, Overtaken, Shares, drop_unused, is_collective
from trueline.parallel.gloo import GlooGroup

BUCKETS_MB = [1, 25]
"""DDP's usual sizes: a small bucket, then larger ones. Unless they are given, all gradients are one bucket in the first
step of a group, whose sum begins when the backward has ended. Source: `compute_bucket_size_limits` in torch's
nn/parallel/distributed.py, which guards models that run collectives in their backward; a job has none."""
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
"""Of a sparse one DDP expects sparse gradients. Source: `produces_sparse_gradient`, ibidem."""
_NEW_BUFFERS = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters


class _Replicated(torch.nn.Module):
    """The module that DDP wraps: the model's own forward, and the contribution."""

    words: torch.nn.Parameter

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.idle = model, False
        """`idle`: the forward computes nothing; the model ran before, or not at all."""
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.idle else self._forward(*args, **kwargs)


class DdpExchange:
    """Replaces `model.forward`, so that `model(...)` runs through DDP in the last piece of a step.

    `width`: numbers beside the gradients.
    """

    def __init__(self, model: torch.nn.Module, group: GlooGroup, width: int) -> None:
        self._model, self._group, self.width = model, group, width
        self._parameters = [value for value in model.parameters() if value.requires_grad]
        self._sparse = {id(one.weight) for one in model.modules() if isinstance(one, _EMBEDDINGS) and one.sparse}
        self._device = next((value.device for value in model.parameters()), torch.device("cpu"))
        self.broken: RuntimeError | None = None
        self.syncing = True
        self.on_begin: Callable[[], None] = lambda: None
        self.on_computed: Callable[[], None] = lambda: None
        self.on_sent: Callable[[], None] = lambda: None
        self._contribution = self.beside = torch.zeros(width, device=self._device)
        """[words + width + parameters] The words, the vector beside the gradients, and who used which parameter."""
        self._host_view: npt.NDArray[np.float32] | None = None
        """The contribution's memory, if that is the host's."""
        self._unused: list[int] = []
        """The places of the parameters that the contribution says were left out."""
        self._weight = torch.ones(())  # the gradient of a loss; rewritten in each step
        self._inside = self._forwarded = False
        self._steps = 0  # in this group
        self.sums: Sequence[torch.Tensor] = ()
        self._pending: list[tuple[Any, torch.Tensor, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        """Buckets being summed: the operation, the tensor it sums, the bucket, and the future that DDP waits for."""
        self._ddp: DistributedDataParallel | None = None
        self.original = model.forward
        """The model's own."""
        self._replicated = _Replicated(model, self.original)
        model.forward = self._forward

    def attach(self, words: int) -> None:
        quiet = {"forward_sync_buffers": False} if _NEW_BUFFERS else {"broadcast_buffers": False}
        self.broken, self._forwarded, self._pending = None, False, []
        self._steps, self.sums, self._unused = 0, (), list[int]()
        self._contribution = torch.zeros(words + self.width + len(self._parameters), device=self._device)
        self._contribution[words + self.width :] = 1.0
        self.beside = self._contribution[words : words + self.width]
        self._host_view = self._contribution.numpy() if self._contribution.is_cpu else None
        self._weight = torch.ones((), device=self._device)
        self._replicated.words = torch.nn.Parameter(torch.zeros_like(self._contribution))
        self._ddp = DistributedDataParallel(
            self._replicated,
            init_sync=False,
            bucket_cap_mb_list=BUCKETS_MB,
            gradient_as_bucket_view=True,  # spares a copy of every gradient; zero_grad sets to None
            **quiet,  # type: ignore[arg-type]
        )
        self._ddp.register_comm_hook(None, lambda _, bucket: self._send(bucket))

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model, or what is pickled of it, has no group: its forward is the model's own."""
        return {"original": self.original, "broken": None, "syncing": False, "_inside": False, "_ddp": None}

    def add(self, piece: BackwardPiece) -> None:
        (piece.scaled * piece.weight).backward()  # type: ignore[no-untyped-call]
        self.on_computed()

    def reduce(
        self, piece: BackwardPiece | None, words: list[float], shares: Shares
    ) -> tuple[list[float], torch.Tensor]:
        if self.broken is not None:
            raise self.broken
        if not self._forwarded:  # no records, or the model ran in evaluation mode, or not as model(...)
            self._run_idle()
        earlier = [value.grad for value in self._parameters]  # held, so that no later one gets the name of an old one
        before = list_versions(earlier)
        if piece is not None:
            loss, weight = piece.scaled, self._weight
            same = loss.shape == weight.shape and loss.dtype == weight.dtype and loss.device == weight.device
            self._run_backward([(loss, weight.fill_(piece.weight) if same else torch.full_like(loss, piece.weight))])
        after = list_versions([value.grad for value in self._parameters])
        places = [at for at, now in enumerate(after) if now == before[at]]
        self._contribute(words, [at for at in places if self._parameters[at].grad is None])
        zeros = [self._lead_to_zero(self._parameters[at]) for at in places]
        rest = ((zero, torch.ones_like(zero)) for zero in zeros)
        self._run_backward([(self._replicated.words, self._contribution), *rest])
        gradient = self._replicated.words.grad
        assert gradient is not None
        self._replicated.words.grad, self._forwarded = None, False
        self._steps += 1
        end = len(words) + self.width
        drop_unused(self._parameters, gradient[end:])
        return gradient[: len(words)].tolist(), gradient[len(words) : end]

    def _lead_to_zero(self, value: torch.nn.Parameter) -> torch.Tensor:
        """Zero, of which `value` has a gradient of the layout that DDP expects."""
        if id(value) in self._sparse:
            none = torch.empty(0, dtype=torch.int64, device=value.device)
            return torch.nn.functional.embedding(none, value, sparse=True).sum()
        return value.reshape(-1)[:1].sum() * 0.0

    def _contribute(self, words: list[float], unused: list[int]) -> None:
        """Writes what goes with the gradients. `unused`: the places of parameters that this member's step left out."""
        if unused != self._unused:
            used = self._contribution[len(words) + self.width :]
            used.fill_(1.0)
            used[unused] = 0.0
            self._unused = unused
        if self._host_view is not None:
            self._host_view[: len(words)] = words
        else:
            self._contribution[: len(words)] = torch.tensor(words)

    def _run_backward(self, roots: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """As torch.autograd.backward, without its comparison of shapes, which are equal here."""
        tensors, gradients = zip(*[pair for pair in roots if pair[0].requires_grad], strict=True)
        self._inside = True  # gradient checkpointing runs the model again, in which DDP would begin another step
        try:
            Variable._execution_engine.run_backward(
                tensors, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        finally:
            self._inside = False

    def detach(self) -> None:
        if self._ddp is not None:
            # A collective that was given up keeps the reducer, whose hooks would wait for it in every later backward.
            self._ddp.reducer._remove_autograd_hooks()
        self._ddp, self.sums = None, ()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        synced = self._ddp is not None and self.syncing and not self._inside and not self.broken
        if not synced or not (self._model.training and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        try:
            return self._run_ddp(*args, **kwargs)
        except Overtaken:
            raise
        except RuntimeError as error:
            if not is_collective(error):
                raise
            self.broken = error
            return self.original(*args, **kwargs)

    def _run_ddp(self, *args: Any, **kwargs: Any) -> Any:
        assert self._ddp is not None
        self._inside = self._forwarded = True
        try:
            if self._steps == 1:
                self._group.call(self._ddp.reducer._rebuild_buckets)
            if self._steps > 1 and self._device.type == "cpu":
                return self._run_reducer(*args, **kwargs)
            return self._ddp(*args, **kwargs)
        finally:
            self._inside = False

    def _run_reducer(self, *args: Any, **kwargs: Any) -> Any:
        """What DDP's own forward does for a model on the host once its buckets stand, without the label for profilers
        and the questions about devices, buffers and joining: of a step of 10 ms these take a fiftieth."""
        assert self._ddp is not None
        reducer = self._ddp.reducer
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        outputs = self._replicated.forward(*args, **kwargs)
        reducer.prepare_for_backward([])
        return outputs

    def _run_idle(self) -> None:
        """Begins DDP's step without the model's forward."""
        self._replicated.idle = True
        try:
            self._run_ddp()
        finally:
            self._replicated.idle = False

    def _send(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: begins the sum (not the mean) of a bucket.

        A bucket on a device is summed there if the group has a backend for it, else as a copy in host memory. The last
        bucket ends the local part of the backward; the hook then waits for all sums, as DDP would do next.
        Raises RuntimeError when a peer fails.
        """
        self._group.check()  # the rest of the backward would be for nothing
        gradients: torch.Tensor = bucket.buffer()
        summed = gradients if self._group.can_sum(gradients) else gradients.cpu()
        devices: list[int | str | torch.device] = [] if gradients.is_cpu else [gradients.device]
        promise: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._pending.append((self._group.sum_bucket(summed), summed, gradients, promise))
        if bucket.is_last():
            self.on_computed()
            self.on_sent()
            self._receive()
        return promise

    def _receive(self) -> None:
        """Waits for the sums of all buckets."""
        pending, self._pending = self._pending, []
        for operation, summed, gradients, promise in pending:
            self._group.wait_bucket(operation)
            if summed is not gradients:
                gradients.copy_(summed)
            promise.set_result(gradients)
        self.sums = [gradients for _, _, gradients, _ in pending]


def list_versions(gradients: Sequence[torch.Tensor | None]) -> list[tuple[int, int]]:
    """What a backward changes of each gradient that it reaches."""
    return [(0, 0) if value is None else (id(value), value._version) for value in gradients]


def list_used(loss: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Those of `parameters` that led to `loss`; all, if a part of it computes its gradients out of sight."""
    nodes, seen = [loss.grad_fn], {loss.grad_fn}
    used = set[int]()
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return list(parameters)
        if (variable := getattr(node, "variable", None)) is not None:
            used.add(id(variable))
        parents = {parent for parent, _ in node.next_functions} - seen
        seen |= parents
        nodes += parents
    return [value for value in parameters if id(value) in used]
