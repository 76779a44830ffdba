"""The seam between a training step and the way its gradients are summed over the members of a group.

    attach ─▶ add(piece) … ─▶ reduce(last piece) ─▶ every member holds the same gradients and the same sums beside them

`ddp.py` reduces buckets while the backward runs; `ordered.py` adds shards in an order that does not depend on the
number of members. Each implementation passes `tests/conformance/gradient_exchange.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from trueline.errors import RecipeError, join_names


@dataclass(frozen=True, slots=True)
class BackwardPiece:
    """The forward of a part of a step, ready for its backward."""

    loss: torch.Tensor
    """[] Of the piece's records."""
    scaled: torch.Tensor
    """`loss` times the gradient scale of fp16: the root of the backward."""
    weight: float
    """Factor of the gradient; for a mean the piece's records / the step's records, so that their sum is the step's."""
    count: float
    """What the loss counts in the step's sum of losses; for a mean the piece's records."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How the shards of a step are distributed over the ranks."""

    counts: Sequence[int]
    """Shards by rank."""
    order: Sequence[int]
    """Ranks in the order of their shards."""


class GradientExchange(Protocol):
    """Sums gradients, and a vector beside them, over the members of a group. Used by one thread.

    Each step starts without gradients. A step that fails ends the group: the caller detaches, and attaches to the next.
    """

    width: int
    """Numbers beside the gradients; it may grow before `attach`."""
    beside: torch.Tensor
    """[width] This member's contribution beside its gradients. The step zeroes it first, and writes it before `add` and
    `reduce`."""
    syncing: bool
    """Whether the next forward belongs to the step's last piece."""
    broken: RuntimeError | None
    """The collective error of a forward, before `reduce` was called."""
    on_begin: Callable[[], None]
    """Called when a step begins, and after the trial of single records: what was computed before does not count."""
    on_computed: Callable[[], None]
    """Called when the local part of a backward is done, before it waits for peers."""
    on_sent: Callable[[], None]
    """Called after that, when everything is on its way to the peers: there is time for something else."""

    @property
    def sums(self) -> Sequence[torch.Tensor]:
        """The memory of all that the last `reduce` summed, words and `beside` too; empty: it lies in many places."""

    def attach(self, words: int) -> None:
        """Joins the process group that was just formed. `words`: how many `reduce` gets in this group."""

    def add(self, piece: BackwardPiece) -> None:
        """Runs the backward of a piece that is not the last; nothing leaves this process."""

    def reduce(
        self, piece: BackwardPiece | None, words: list[float], shares: Shares
    ) -> tuple[list[float], torch.Tensor]:
        """Runs the backward of the last piece (None: no records) and sums over all members.

        Returns the sums of `words` and of `beside`; gradients are summed in place.
        Raises RuntimeError when a peer fails.
        """

    def detach(self) -> None:
        """Leaves the group: no later gradient reaches it."""


def drop_unused(parameters: Sequence[torch.nn.Parameter], used: torch.Tensor) -> None:
    """Leaves the parameters without a gradient that no member used. `used`: by how many members each was."""
    if not used.all():
        for place in (used == 0).nonzero().flatten().tolist():
            parameters[place].grad = None


class Overtaken(RuntimeError):
    """A computation was given up: its group was cut and cannot complete the step."""


def is_collective(error: RuntimeError) -> bool:
    """Whether `error` came from the process group and not from the user's model."""
    if isinstance(error, dist.DistError | Overtaken):
        return True
    text = str(error)
    return any(mark in text for mark in ("gloo", "Connection closed by peer", "Connection reset", "ProcessGroup"))


def unused_parameters(names: Sequence[str]) -> RecipeError:
    """The error for parameters without a gradient; `names`: as far as they are known."""
    which = f" ({join_names(names)})" if names else ""
    return RecipeError(
        f"some parameters of the model took no part in the loss of a step{which}",
        hint="set `find_unused_parameters = True` in the recipe if that is meant, or use every parameter in its first "
        "step",
    )
