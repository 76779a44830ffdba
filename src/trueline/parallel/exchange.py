"""The seam between a training step and the way its gradients are summed over the members of a group.

    begin ─▶ add(piece) … ─▶ reduce(last piece) ─▶ every member holds the same gradients and the same sums beside them

`ddp.py` sums buckets while the backward runs; `ordered.py` adds shards in an order that no number of members changes.
Each implementation passes `tests/conformance/gradient_exchange.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from trueline.errors import RecipeError, join_names


@dataclass(frozen=True, slots=True)
class Piece:
    """A forward's result: a part of the step that this member computes."""

    loss: torch.Tensor
    """The mean over the piece's records."""
    scaled: torch.Tensor
    """The same, scaled for half precision: what backward starts from."""
    weight: float
    """The piece's records / the step's: sums of weighted gradients are the gradient of the step's mean."""
    count: int
    """Records of the piece."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How the shards of a step lie with the ranks."""

    counts: Sequence[int]
    """Shards of each rank."""
    order: Sequence[int]
    """Ranks in the order of their shards."""


class GradientExchange(Protocol):
    """Sums gradients, and a vector beside them, over the members of a group. Used by one thread."""

    beside: torch.Tensor
    """[width] This member's contribution beside its gradients. The step writes it before `add` and `reduce`."""
    syncing: bool
    """Whether the next forward is that of the step's last piece."""
    broken: RuntimeError | None
    """Why a collective failed before `reduce` was called; None: none has."""
    on_computed: Callable[[], None]
    """Called when the local part of a backward is over, before it waits for peers."""
    on_sent: Callable[[], None]
    """Called after that, when everything is on its way to the peers: there is time for something else."""

    def attach(self, words: int) -> None:
        """Joins the process group that was just formed. `words`: how many `reduce` gets in this group."""
        ...

    def begin(self) -> None:
        """Begins a step, after the gradients were zeroed: drops contributions and what an earlier attempt left."""
        ...

    def add(self, piece: Piece) -> None:
        """Runs the backward of a piece that is not the last; nothing leaves this process."""
        ...

    def reduce(self, piece: Piece | None, words: list[float], shares: Shares) -> tuple[list[float], torch.Tensor]:
        """Runs the backward of the last piece, if there is one, and sums over all members.

        Returns the sums of `words` and of `beside`; gradients are summed in place.
        Raises RuntimeError when a peer fails.
        """
        ...

    def detach(self) -> None:
        """Leaves the group: no later gradient reaches it."""
        ...


def is_collective(error: RuntimeError) -> bool:
    """Whether `error` came from the process group and not from the user's model."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return any(mark in text for mark in ("gloo", "Connection closed by peer", "Connection reset", "ProcessGroup"))


def unused_parameters(names: Sequence[str]) -> RecipeError:
    which = f" ({join_names(names)})" if names else ""
    return RecipeError(
        f"some parameters of the model took no part in the loss of a step{which}",
        hint="set `find_unused_parameters = True` in the recipe, or use every parameter in every step",
    )
