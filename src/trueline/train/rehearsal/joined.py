"""Tries whether an optimizer that joins continues as the others do: two steps, their state to another one, two more,
and then as many as the job has, as far as the time lets, with another one that joins half-way: slow weights may count
in each sixth step, or each hundredth.

What an optimizer of a user's own, its hooks or a scheduler's function keep outside of `state_dict()` would not be
there, and the workers' weights would part without a word. Optimizers and schedulers of torch's own are not tried.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from trueline.checkpoint.checkpoint import expect_holdable
from trueline.data.loading import seeding
from trueline.errors import CheckpointError, UsageError
from trueline.train.rehearsal import places
from trueline.train.rehearsal.steps.constants import list_constants
from trueline.train.rehearsal.steps.traced_step import StepNotes
from trueline.train.step.optimizer_step import OptimizerStep, is_of_torch

MOST_BYTES, MOST_SIDE = 16 << 20, 16
"""Of a model whose optimizer is tried as it is; of a larger one no dimension of a tensor is longer: the trial takes two
copies of it, with two states."""
_HINT = (
    "a worker that joins receives state_dict(): keep it in optimizer.state[parameter] or in numbers of param_groups, "
    "or write state_dict() and load_state_dict(); several optimizers: trueline.JointOptimizer"
)
_OF_OPTIMIZERS = {"state", "param_groups", "defaults"}
STEPS, FURTHER_S, MOST_NUMBERS = 2, 0.3, 8
"""Before and after the state is taken; how long further ones may take, in seconds of the processor's time; numbers that
a count is compared with and has in such a trial."""


def needs_trial(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> bool:
    """Whether the optimizer's step or the schedule has code of a user's own."""
    parts = getattr(optimizer, "parts", (optimizer,))
    hooked = any(part._optimizer_step_pre_hooks or part._optimizer_step_post_hooks for part in parts)
    planned = scheduler is not None and _has_functions(scheduler)
    return hooked or planned or not is_of_torch(optimizer)


def _has_functions(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    own = not type(scheduler).__module__.startswith("torch.") or hasattr(scheduler, "lr_lambdas")
    return own or any(map(_has_functions, parts))


def expect_same_after_join(make: Callable[[], OptimizerStep], total_steps: int = 2 * STEPS) -> str:
    """Raises UsageError unless a step that `make` returns continues as another one whose state it has taken, in a job
    of `total_steps`. Returns why the trial ended early, if it did."""
    try:
        with seeding.preserve_generators():
            off, after, why = _try(make, total_steps)
    except (CheckpointError, UsageError):
        raise
    except Exception as error:  # a user's code may raise anything; the first step shows it
        if "closure" in str(error) or "'NoneType' object is not callable" in str(error):
            raise UsageError(
                f"the optimizer computes the loss again inside of its step, by a closure ({type(error).__name__}: "
                f"{error}); a step of a job has one forward and one backward",
                hint="sharpness-aware optimizers (SAM) take two, of which no sum over workers is known here: choose "
                "an optimizer that takes the gradients of one",
            ) from error
        return f"{type(error).__name__}: {error}"
    if off:
        raise UsageError(
            f"the optimizer or its schedule keeps something that is not in its state_dict(): parameters that took the "
            f"state of others differ from them by {off:.3g} after {after} more steps",
            hint=_HINT,
        )
    return why


def _try(make: Callable[[], OptimizerStep], total_steps: int) -> tuple[float, int, str]:
    """By how much parameters differ, 0.0: they never do; after how many steps since the state was taken; and why the
    trial ended early."""
    ahead = make()
    for step in range(STEPS):
        _step(ahead, step)
    joining = _join(make, ahead)
    for step in (STEPS, STEPS + 1):  # a schedule acts on the step after its own
        _step(ahead, step)
        _step(joining, step)
    if off := _differ(joining, ahead):
        return off, STEPS, ""
    _expect_unused_numbers(make, ahead, total_steps)
    return _try_further(make, joining, ahead, total_steps)


def _expect_unused_numbers(make: Callable[[], OptimizerStep], ahead: OptimizerStep, total_steps: int) -> None:
    """Raises UsageError if parameters differ where a number that steps change, and that is not in the state, has become
    one with which the optimizer's code compares it, or one that stands in it."""
    joining = {place.name: place.value for place in _list_numbers(_join(make, ahead))}
    kept = [place for place in _list_numbers(ahead) if joining.get(place.name) not in (None, place.value)]
    began = time.thread_time()
    for place in kept:
        notes = StepNotes(total_steps)
        _with_number(make, ahead, place.name, notes.trace(place.value))
        kinds = [("", type(part)) for part in getattr(ahead.optimizer, "parts", (ahead.optimizer,))]
        likely = notes.choose_like(place.value, MOST_NUMBERS) + list_constants(kinds, total_steps)
        for number in dict.fromkeys(likely):
            if time.thread_time() > began + FURTHER_S:
                break
            if off := _differ(_with_number(make, ahead, place.name, number), _with_number(make, ahead, place.name)):
                raise UsageError(
                    f"the optimizer keeps {place.name[3:]}, which is not in its state_dict(): with {number:.7g} there "
                    f"parameters differ by {off:.3g} after {STEPS + 1} more steps from those that took the state",
                    hint=_HINT,
                )


def _list_numbers(one: OptimizerStep) -> list[places.KeptPlace]:
    """The numbers that the optimizer keeps beside its state."""
    tensors = {id(value) for value in (*one.model.parameters(), *one.model.buffers())}
    found = []
    for at, part in enumerate(getattr(one.optimizer, "parts", (one.optimizer,))):
        room = {key: value for key, value in vars(part).items() if key not in _OF_OPTIMIZERS}
        kept = places.walk(f"{at}: ", room, set(tensors))
        # `room` is a copy: an attribute of the optimizer is set in the optimizer.
        found += [
            replace(place, put=functools.partial(setattr, part, key)) if (key := place.name[3:]) in room else place
            for place in kept
            if type(place.value) in (int, float)
        ]
    return found


def _with_number(
    make: Callable[[], OptimizerStep], ahead: OptimizerStep, name: str, number: Any = None
) -> OptimizerStep:
    """One that has joined `ahead` and has taken some steps, the first with `number` in the place of this name."""
    one = _join(make, ahead)
    for place in _list_numbers(one) if number is not None else ():
        if place.name == name:
            place.put(number)
    for step in range(STEPS, 2 * STEPS + 1):
        _step(one, step)
    return one


def _join(make: Callable[[], OptimizerStep], ahead: OptimizerStep) -> OptimizerStep:
    """A new one that has taken the parameters and the state of `ahead`."""
    joining = make()
    with torch.no_grad():
        for mine, its in zip(joining.model.parameters(), ahead.model.parameters(), strict=True):
            mine.copy_(its)
    expect_holdable(state := ahead.state())
    joining.restore(copy.deepcopy(state))
    return joining


def _try_further(
    make: Callable[[], OptimizerStep], joining: OptimizerStep, ahead: OptimizerStep, total_steps: int
) -> tuple[float, int, str]:
    """As `_try`, for half of the steps that the job has or the time lets; another one joins then, for as many more."""
    began, joined_at, end = time.thread_time(), STEPS, total_steps
    for step in range(2 * STEPS, total_steps):
        late = time.thread_time() > began + FURTHER_S / 2
        if step >= end:
            break
        try:
            if joined_at == STEPS and (late or step >= total_steps // 2):
                joining, joined_at, end = _join(make, ahead), step, min(2 * step, total_steps)
            _step(ahead, step)
            _step(joining, step)
        except Exception as error:  # noqa: BLE001  the gradients are none of a training
            return 0.0, 0, f"after {step} steps {type(error).__name__}: {error}"
        off = _differ(joining, ahead)
        if not math.isfinite(off):
            break
        if off:
            return off, step + 1 - joined_at, ""
    return 0.0, 0, ""


def _differ(one: OptimizerStep, other: OptimizerStep) -> float:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max((float((mine - its).detach().abs().max()) for mine, its in pairs if mine.numel()), default=0.0)


def _step(one: OptimizerStep, step: int) -> None:
    made = torch.Generator().manual_seed(step)
    for value in one.model.parameters():
        if value.requires_grad:
            noise = torch.randn(value.shape, generator=made, dtype=torch.float32)
            value.grad = (0.01 * noise).to(value.device, value.dtype)
    one.apply(steps=step)


def copy_step(step: OptimizerStep) -> OptimizerStep:
    """A step with copies of model, optimizer and scheduler. An optimizer's own `__getstate__` leaves things out."""
    memo = _cut_large(step.model, vars(step.optimizer))
    model = copy.deepcopy(step.model, memo)
    optimizer = _copy_optimizer(step.optimizer, memo)
    scheduler = copy.deepcopy(step.scheduler, memo)
    return OptimizerStep(model, optimizer, scheduler, step.options, owned=step.owned)


def copy_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy for a trial of an optimizer."""
    return copy.deepcopy(model, _cut_large(model, ()))


def _cut_large(model: torch.nn.Module, beside: Any) -> dict[int, Any]:
    """By id, for `deepcopy`, parts of the tensors of a large model and of those `beside` it; nothing of a small one."""
    own = [*model.parameters(), *model.buffers()]
    if sum(value.nbytes for value in own) <= MOST_BYTES:
        return {}
    return {id(value): _cut(value) for value in (*own, *_list_tensors(beside, set()))}


def _cut(value: torch.Tensor) -> torch.Tensor:
    part = value.detach()[tuple(slice(MOST_SIDE) for _ in value.shape)].clone()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(part, requires_grad=value.requires_grad)
    return part.requires_grad_(value.requires_grad)


def _list_tensors(room: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in the attributes of an optimizer, its parts, and in what these hold."""
    if isinstance(room, torch.Tensor):
        yield room
        return
    inner: Any = ()
    if isinstance(room, Mapping):
        inner = (*room.keys(), *room.values())
    elif isinstance(room, list | tuple | set | deque):
        inner = room
    elif isinstance(room, torch.optim.Optimizer):
        inner = (vars(room),)
    if id(room) not in seen:
        seen.add(id(room))
        for one in list(inner):
            yield from _list_tensors(one, seen)


def _copy_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    for part in getattr(optimizer, "parts", ()):
        _copy_optimizer(part, memo)
    clone: torch.optim.Optimizer = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = clone
    clone.__dict__.update(copy.deepcopy(optimizer.__dict__, memo))
    clone.__dict__.pop("step", None)  # a scheduler's wrapper, which steps the original
    return clone
