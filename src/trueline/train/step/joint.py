"""Several optimizers as one, for loops with more than one loss: the networks of a GAN, an actor and its critic."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from trueline.errors import UsageError


class JointOptimizer(torch.optim.Optimizer):
    """Steps `optimizers`, whose parameters differ, after one another as one step of the job.

    A step's gradients are those of the sum of its losses, so several backward passes are one: pass `job.step` the sum.
    A scheduler is made over one of the optimizers; this one has all their groups and the whole state. An optimizer that
    calls its closure (LBFGS) gets one that computes nothing: it takes part with one evaluation a step (`max_iter=1`, no
    line search). Raises UsageError for more, and for parameters in two optimizers.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.parts = optimizers
        try:
            super().__init__([group for part in optimizers for group in part.param_groups], {})
        except ValueError as error:
            raise UsageError(
                f"the optimizers cannot be joined: {error}", hint="give each its own parameters"
            ) from error
        for part in optimizers:
            check_closure(part, allowed=True)
            self.state.update(part.state)
        self._share()

    def _share(self) -> None:
        """Gives each part its groups and the common state."""
        at = 0
        for part in self.parts:
            part.param_groups = self.param_groups[at : at + len(part.param_groups)]
            part.state = self.state
            at += len(part.param_groups)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            if _needs_closure(part):
                part.step(_compute_nothing)
            else:
                part.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share()


def _compute_nothing() -> float:
    """The gradients of the step are there already."""
    return 0.0


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_closure(optimizer: torch.optim.Optimizer, *, allowed: bool = False) -> None:
    """Raises UsageError for an optimizer that evaluates the loss again in its step: its records would count twice."""
    many = any(group.get("max_iter", 1) != 1 or group.get("line_search_fn") for group in optimizer.param_groups)
    if _needs_closure(optimizer) and (many or not allowed):
        name = type(optimizer).__name__
        raise UsageError(
            f"{name} computes the loss again inside of its step, by a closure; a step of a job has one forward",
            hint=f"trueline.JointOptimizer({name}(params, max_iter=1)) takes one evaluation a step, no line search",
        )
