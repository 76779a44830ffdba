"""One worker's copy of the job's state, and the gradients' way through DDP.

The user's model is wrapped in torch's DistributedDataParallel (bucketed, overlapped with backward) together with one
more parameter, the words of the ledger, whose gradient is what this worker contributes to the step. So the account of
a step travels in the very allreduce that carries its gradients and costs no round trip.

Gradients are weighted by records: with n of a step's B records here, the mean loss counts n/B, whatever the split.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trueline.errors import RecipeError, listed
from trueline.state import tree
from trueline.train import ledger as books
from trueline.train.ledger import Ledger

TALLY_BYTES = 64 << 10
"""Records are tallied one by one when their counters are no larger than this, or than 2 % of the parameters."""


class _Replicated(torch.nn.Module):
    """What DDP sees: the model's own forward, and the words."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any], width: int, *, tie: bool) -> None:
        super().__init__()
        self.model = model
        self.words = torch.nn.Parameter(torch.zeros(width))
        self._forward = forward
        self._tie = tie

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._forward(*args, **kwargs)
        return (outputs, self.words * 1.0) if self._tie else outputs


class Replica:
    """Model, optimizer, scheduler and ledger; `model(...)` goes through DDP while a group is attached."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        num_records: int,
        *,
        find_unused_parameters: bool = False,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        tallied = _tallied(model, num_records)
        self.ledger = Ledger(num_records=num_records, tally=np.zeros(num_records, np.int32) if tallied else None)
        self.find_unused = find_unused_parameters
        self.broken: RuntimeError | None = None
        self._original = model.forward
        self._inside = False
        self._ddp: DistributedDataParallel | None = None
        width = books.WORDS + (num_records if tallied else 0)
        self._replicated = _Replicated(model, self._original, width, tie=find_unused_parameters)
        model.forward = self._forward

    # The gradients' way. ---------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Wraps the model for the process group that was just formed."""
        quiet = {"forward_sync_buffers": False} if _NEW_BUFFERS else {"broadcast_buffers": False}
        self.broken = None
        self._ddp = DistributedDataParallel(
            self._replicated,
            init_sync=False,
            find_unused_parameters=self.find_unused,
            gradient_as_bucket_view=True,  # spares a copy of every gradient; zero_grad sets to None
            **quiet,  # type: ignore[arg-type]
        )

    def detach(self) -> None:
        """Forgets the group; DDP's hooks go with it, so that an old group never sees a new gradient."""
        self._ddp = None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._ddp is None or self._inside or self.broken or not (self.model.training and torch.is_grad_enabled()):
            return self._original(*args, **kwargs)
        self._inside = True
        self._entered_model = False
        try:
            outputs = self._ddp(*args, **kwargs)
            return outputs[0] if self.find_unused else outputs
        except RuntimeError as error:
            if not is_collective(error):
                raise _explained(error) from error
            self.broken = error
            return self._original(*args, **kwargs)
        finally:
            self._inside = False

    def backward(self, loss: torch.Tensor, words: torch.Tensor, weight: float) -> list[float]:
        """Backward of `weight` x `loss` with `words` beside it; returns the first words summed over all workers.

        `weight` is records here / records of the step. Raises RuntimeError when a peer fails.
        """
        size = dist.get_world_size()
        scaled = loss * (weight * size)
        total = scaled + (self._replicated.words * (words * size)).sum().to(scaled.dtype)
        total.backward()  # type: ignore[no-untyped-call]
        gradient = self._replicated.words.grad
        assert gradient is not None
        self._summed = gradient
        found: list[float] = gradient[: books.WORDS].tolist()
        return found

    def check_all_used(self) -> None:
        """Raises RecipeError when parameters took no part in the backward that has just ended."""
        named = self.model.named_parameters()
        unused = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        if unused and not self.find_unused:
            raise _unused(unused)

    def tally(self) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        """How often each record was in the step whose backward has just ended."""
        if self.ledger.tally is None:
            return None
        counts: np.ndarray[Any, np.dtype[np.int32]] = self._summed[books.WORDS :].round().to(torch.int32).numpy()
        return counts

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._replicated.words.grad = None

    def apply(self) -> None:
        """The optimizer's and the scheduler's step."""
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    # The state's way. ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The whole state; its tensors are the live ones."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "ledger": self.ledger.as_tree(),
        }

    def snapshot(self) -> dict[str, Any]:
        """The whole state, copied: a thread may write it while training goes on."""
        skeleton, tensors = tree.encode(self.state())
        copied: dict[str, Any] = tree.decode(skeleton, [tensor.clone() for tensor in tensors])
        return copied

    def restore(self, state: dict[str, Any]) -> None:
        """Takes `state` as its own."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.ledger = Ledger.from_tree(state["ledger"])

    def exchange(self, *, source: int, take: bool) -> None:
        """Broadcasts the state of rank `source` over the group; a rank that is behind takes it.

        Raises RuntimeError when a peer fails; then nothing was taken.
        """
        sending = dist.get_rank() == source
        skeleton, tensors = tree.encode(self.state()) if sending else (None, [])
        shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        header = _broadcast_bytes(json.dumps([skeleton, shapes]).encode() if sending else b"", source)
        skeleton, shapes = json.loads(header)
        flat = torch.cat([_as_bytes(tensor) for tensor in tensors]) if sending and tensors else None
        received = _broadcast_flat(flat, source, sum(_nbytes(dtype, shape) for dtype, shape in shapes))
        if take and not sending:
            self.restore(tree.decode(skeleton, _split(received, shapes)))


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
    which = f" ({listed(names)})" if names else ""
    return RecipeError(
        f"some parameters of the model took no part in the loss of a step{which}",
        hint="set `find_unused_parameters = True` in the recipe, or use every parameter in every step",
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _nbytes(dtype: str, shape: list[int]) -> int:
    return int(getattr(torch, dtype).itemsize * np.prod(shape, dtype=np.int64))


def _split(flat: torch.Tensor, shapes: list[list[Any]]) -> list[torch.Tensor]:
    tensors, at = [], 0
    for dtype, shape in shapes:
        size = _nbytes(dtype, shape)
        piece = flat[at : at + size].clone()  # a copy of its own: aligned, and free of the large buffer
        tensors.append(piece.view(getattr(torch, dtype)).reshape(shape))
        at += size
    return tensors


def _broadcast_bytes(data: bytes, source: int) -> bytes:
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, source)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None
    received = _broadcast_flat(flat, source, int(size.item()))
    return bytes(received.numpy())


def _broadcast_flat(flat: torch.Tensor | None, source: int, size: int) -> torch.Tensor:
    buffer = torch.empty(size, dtype=torch.uint8) if flat is None else flat
    piece = 64 << 20
    for start in range(0, size, piece):
        dist.broadcast(buffer[start : start + piece], source)
    return buffer
