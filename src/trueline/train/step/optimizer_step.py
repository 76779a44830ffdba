"""The optimizer's side of a step: unscale, clip, step, schedule, average. Deterministic in the reduced gradients.

Every member holds the same reduced gradients and calls `apply` once for them, so all members decide alike, also that a
step in half precision overflowed. Such a step is not applied: it is computed again with half the scale, so its records
still count once.
"""

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trueline.data.loading.seeding import seed_all
from trueline.errors import TrainError, UsageError, join_names
from trueline.train.devices import is_lost
from trueline.train.step.joint import check_closure
from trueline.train.step.optimizer_settings import OptimizerSettings, read_attributes, set_attributes
from trueline.train.step.options import Options

MEASURE_S = 1.0
OPTIMIZER = -1
"""In place of the shard in the seed of what an optimizer draws (Langevin noise, stochastic rounding)."""


def _take_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, without the label for profilers that torch puts around it, where no profiler runs and no hook
    is set: of a step of 10 ms the label takes a hundredth."""
    step = type(optimizer).step
    inner: Callable[..., object] | None = getattr(step, "__wrapped__", None) if hasattr(step, "hooked") else None
    watched = (
        "step" in vars(optimizer)  # schedulers put their own there, which counts
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch.autograd.profiler._is_profiler_enabled
    )
    if inner is None or watched:
        optimizer.step()
    else:
        inner(optimizer)


class OptimizerStep:
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        options: Options,
        *,
        owned: bool = False,
        seed: int = 0,
    ) -> None:
        """`owned`: nothing but this object changes parameters or settings: the loop is not a user's own. `seed`: the
        job's; what the optimizer draws follows from it and the step, so that all members draw the same."""
        self.model, self.optimizer, self.scheduler, self.options = model, optimizer, scheduler, options
        self.owned, self._seed = owned, seed
        self._seeded = -1
        """Steps before the one that the generators are seeded for; -1: they are not."""
        self.settings = OptimizerSettings(optimizer, shared=not owned)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        device = self._parameters[0].device.type if self._parameters else "cpu"
        self.scaler = torch.amp.GradScaler(device, enabled=options.precision == "fp16")
        self.scale_loss(torch.zeros((), device=device))  # a member without records in its first step unscales too
        self.measured: tuple[float, float] = (0.0, 0.0)
        """Learning rate and gradient norm of the last step; zeros where they were not measured."""
        self._measured_at = -math.inf
        self.before_change: Callable[[], None] = lambda: None
        """Called before parameters, optimizer state or averages change."""
        self.change: Callable[[], AbstractContextManager[object]] = self._begin_change
        """Around a step in which they change."""
        self._averages: dict[str, torch.Tensor] = {}
        if options.ema:
            self._averages = {name: value.detach().clone() for name, value in model.named_parameters()}

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the scale of the gradients (1 unless the precision is fp16)."""
        return self.scaler.scale(loss) if self.scaler.is_enabled() else loss

    def zero_grad(self) -> None:
        """Clears all gradients, also of parameters that the optimizer does not have: they count in the norm."""
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:  # torch's own does what follows
            self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None

    def begin(self) -> None:
        """Begins a step: no gradients, and the generators are whatever they are."""
        self.zero_grad()
        self._seeded = -1

    def seed(self, steps: int) -> None:
        """Seeds the generators for the step after `steps`; while the worker waits for its gradients, this takes no
        time."""
        seed_all(self._seed, steps, OPTIMIZER)
        self._seeded = steps

    def apply(self, measured: float | None = None, *, steps: int = 0) -> bool:
        """Applies the gradients in place; False if they overflowed, so that only the scale has changed.

        `steps` were applied before. In the first steps the average's decay is at most (1 + steps) / (10 + steps), as in
        TensorFlow's ExponentialMovingAverage, so that it forgets its beginning faster.
        `measured`: the monitored value of the current state, smaller is better. A plateau schedule gets it here and not
        when it was measured, since a regroup repeats the evaluation.
        Raises TrainError when no scale helps, or when a norm that is to be clipped is not finite.
        """
        applied = self._apply(measured, steps)
        if applied:
            self.settings.keep()
        else:
            self.settings.rewind()
        return applied

    def _apply(self, measured: float | None, steps: int) -> bool:
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = self._clip() if self.options.clip_norm else None
        self._measure(norm)
        undo = self._step_plateau(measured)
        with self.change():
            return self._step_all(steps, undo)

    def _begin_change(self) -> AbstractContextManager[object]:
        self.before_change()
        return nullcontext()

    def _step_all(self, steps: int, undo: Callable[[], None]) -> bool:
        """Steps the optimizer, and then the schedule and the averages."""
        if self._seeded != steps:
            self.seed(steps)
        self._seeded = -1
        if not self._step_optimizer(steps):
            undo()
            return False
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        if self._averages:
            with torch.no_grad():
                live = [value.detach() for value in self.model.parameters()]
                decay = min(self.options.ema, (1 + steps) / (10 + steps))
                get_ema_multi_avg_fn(decay)(list(self._averages.values()), live, 1)  # type: ignore[no-untyped-call]
        return True

    def _step_optimizer(self, steps: int) -> bool:
        """False if the gradients overflowed. Raises UsageError where one of torch's optimizers does not take them."""
        try:
            if self.scaler.is_enabled():
                return self._step_scaled()
            _take_step(self.optimizer)
            return True
        except (RuntimeError, ValueError, AssertionError) as error:
            if isinstance(error, torch.OutOfMemoryError) or is_lost(error) or not is_of_torch(self.optimizer):
                raise
            raise explain(self.optimizer, self.model, error, steps) from error

    def _step_plateau(self, measured: float | None) -> Callable[[], None]:
        """Passes `measured` to a plateau schedule; returns a function that undoes it."""
        plateau, groups = self.scheduler, self.optimizer.param_groups
        if measured is None or not isinstance(plateau, ReduceLROnPlateau):
            return lambda: None
        state, rates = plateau.state_dict(), [copy.deepcopy(group["lr"]) for group in groups]

        def undo() -> None:
            plateau.load_state_dict(state)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

        plateau.step(measured)
        return undo

    def _measure(self, norm: torch.Tensor | None) -> None:
        """Once in MEASURE_S: waiting for a norm, and computing it where nothing is clipped, takes time."""
        self.measured = (0.0, 0.0)
        if time.monotonic() < self._measured_at + MEASURE_S:
            return
        self._measured_at = time.monotonic()
        norm = self._norm() if norm is None else norm
        self.measured = float(self.optimizer.param_groups[0].get("lr", 0.0)), float(norm)

    def _norm(self) -> torch.Tensor:
        found = [value.grad for value in self._parameters if value.grad is not None]
        return torch.nn.utils.get_total_norm([one.coalesce().values() if one.is_sparse else one for one in found])

    def _clip(self) -> torch.Tensor:
        norm = self._norm()
        found = [value.grad for value in self._parameters if value.grad is not None]
        if any(one.is_sparse for one in found):
            factor = torch.clamp(self.options.clip_norm / (norm + 1e-6), max=1.0)
            for one in found:
                one.mul_(factor)
        else:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.options.clip_norm, norm)
        if not self.scaler.is_enabled() and not bool(torch.isfinite(norm)):
            raise TrainError(
                "the norm of the gradients is not finite, though the loss is",
                hint="look for square roots, logarithms and divisions near zero in the model and the loss",
            )
        return norm

    def _step_scaled(self) -> bool:
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        after = self.scaler.get_scale()
        if after < 2.0**-20:
            raise TrainError(
                f"the gradients overflow in fp16 at a scale of {before:g}, though the loss is finite",
                hint='train with precision = "bf16" or "fp32"',
            )
        return after >= before

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Gives the model its averaged parameters, if there are any, while the block runs."""
        if not self._averages:
            yield
            return
        self.before_change()
        live = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self._load(self._averages)
        try:
            yield
        finally:
            self._load(live)

    def _load(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(values[name])

    def stable_memory(self) -> frozenset[int]:
        """Where the tensors lie that change after `before_change` alone: no buffers, nor weights that a forward scales
        down."""
        scaled = {id(own) for module in self.model.modules() if getattr(module, "max_norm", None) is not None
                  for own in module.parameters(recurse=False)}  # fmt: skip
        own = [value for value in self.model.parameters() if id(value) not in scaled]
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [value for value in (*own, *moments, *self._averages.values()) if isinstance(value, torch.Tensor)]
        return frozenset(value.data_ptr() for value in tensors)

    def foresee_moments(self) -> list[torch.Tensor]:
        """A tensor of the shape of each moment that the usual optimizers will have: two of Adam's kind, one of
        momentum."""
        return [
            value for group in self.optimizer.param_groups for value in group["params"] if value.is_cpu
            for _ in range(2 if "betas" in group else bool(group.get("momentum")))
        ]  # fmt: skip

    def _parts(self) -> tuple[torch.optim.Optimizer, ...]:
        return getattr(self.optimizer, "parts", (self.optimizer,))

    def state(self) -> dict[str, Any]:
        """Optimizer, scheduler, scaler and averages; the tensors are the live ones."""
        attributes = [read_attributes(part) for part in self._parts()]
        return {
            **({"attributes": attributes} if any(attributes) else {}),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler.is_enabled() else None,
            "ema": dict(self._averages) or None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for part, values in zip(self._parts(), state.get("attributes", ()), strict=False):
            set_attributes(part, values)
        self.settings.keep()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        for name, value in (state["ema"] or {}).items():
            if name in self._averages:  # a checkpoint may have those of tables on servers too
                self._averages[name].copy_(value)


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    parts = getattr(optimizer, "parts", (optimizer,))
    return all(type(part).__module__.startswith("torch.") for part in parts)


def explain(optimizer: torch.optim.Optimizer, model: torch.nn.Module, error: Exception, steps: int) -> UsageError:
    """Why an optimizer of torch's did not take the gradients of a step, which is not applied."""
    name, found = type(optimizer).__name__, list(model.named_parameters())
    sparse = [name for name, value in found if value.grad is not None and value.grad.is_sparse]
    dense = [name for name, value in found if value.grad is not None and not value.grad.is_sparse]
    kinds = [f"{kind} for {join_names(names)}" for kind, names in (("sparse", sparse), ("dense", dense)) if names]
    hint = f"see {name} in torch's documentation, or choose another optimizer"
    if sparse and dense:
        hint = "give each kind its own: trueline.JointOptimizer(torch.optim.SparseAdam(...), torch.optim.Adam(...))"
    elif "sparse" in str(error).lower() or "dense" in str(error).lower():
        hint = "SparseAdam takes the gradients of torch.nn.Embedding(sparse=True), and Adam all others"
    return UsageError(
        f"{name} does not take the gradients of step {steps}, which are {' and '.join(kinds)}: {error}", hint=hint
    )


def check_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    *,
    evaluates: bool = False,
) -> None:
    """Raises UsageError for parameters that the model does not have, which would be neither summed nor transferred, and
    for an optimizer that computes the loss itself."""
    known = {id(parameter) for parameter in model.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in parameters if id(parameter) not in known]
    if strange:
        raise UsageError(
            f"the optimizer has {len(strange)} parameters that are not of the model (the first of shape "
            f"{list(strange[0].shape)})",
            hint="make them a part of the model, e.g. a criterion with parameters a submodule of it",
        )
    check_closure(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau) and not evaluates:
        raise UsageError(
            "a ReduceLROnPlateau follows evaluations while training, and this job has none",
            hint="give Elastic a validation=..., or set monitor or evaluate_every in the recipe",
        )
    hooked = [name for name, value in model.named_parameters() if getattr(value, "_post_accumulate_grad_hooks", None)]
    if hooked:
        raise UsageError(
            f"a hook runs after each gradient of {join_names(hooked)} was accumulated, and would see that of a part of "
            "a step",
            hint="do what it does in the step() of an optimizer of your own; clip with clip_norm",
        )
    lazy = [name for name, value in model.named_parameters() if torch.nn.parameter.is_lazy(value)]
    if lazy:
        raise UsageError(
            f"the model's parameters {join_names(lazy)} have no shape yet",
            hint="run the model once on a batch before it goes to its optimizer and to Elastic",
        )


def check_length(scheduler: torch.optim.lr_scheduler.LRScheduler | None, steps: int) -> None:
    """Raises UsageError for a schedule that ends before the `steps` of the job: torch's own would end it there. One of
    several in a row has the steps until the next one."""
    parts = list(getattr(scheduler, "_schedulers", ()))
    lengths = [steps] * len(parts)
    if isinstance(scheduler, SequentialLR):
        bounds = [0, *(min(one, steps + 1) for one in scheduler._milestones), steps + 1]
        lengths = [end - 1 - begin for begin, end in itertools.pairwise(bounds)]
    for part, length in zip(parts, lengths, strict=True):
        check_length(part, length)
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < steps:
        raise UsageError(
            f"the OneCycleLR is for {scheduler.total_steps} steps, and this job has {steps} for it",
            hint=f"total_steps={steps}: an epoch has as many steps as global_batch goes into its records, rounded up",
        )
