"""Tries what a loop does after a step that was applied: three batches for which `job.step` returns True.

A worker that joins receives model, optimizer and scheduler, and nothing else that a loop keeps: averages of weights, a
second model, counters. So after a batch parameters have to be as they were, as have other models and lists of weights.
The third batch is the first one again, and has to have the same loss and the same settings; so have more batches, in
which counters and lists that the loop changes have other values (`kept.py`). Between a loss and the end
of the loop's body parameters have odd values (`WILD`), so that a clamp, a norm or an average shows.

This happens in a fork that ends afterwards: files that the loop's code opens for writing are /dev/null there.
"""

from __future__ import annotations

import builtins
import gc
import io
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from trueline.data.loading import seeding
from trueline.errors import UsageError
from trueline.train.rehearsal import kept
from trueline.train.step import model_traits
from trueline.train.step.contribution import StepBatch
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.trial import FEW, LossTrial

WILD, SEEN = 1e3, 4096
"""The parameters' values meanwhile, with either sign, and how many elements of a tensor have them or are compared."""
_JOINS = "a worker that joins receives model, optimizer and scheduler, and repeats no line of the loop"
_AVERAGE = "Options(ema=0.999) averages the weights, in all workers and in checkpoints"
_ROOMS = (dict, OrderedDict, list)  # and no subclass, which may compute what it has


@dataclass(frozen=True, slots=True)
class Kept:
    """Tensors of a loop beside its model: of another module, or a dict or list with as many shapes as the model has."""

    what: str
    values: Callable[[], Iterable[torch.Tensor]]


class AppliedTrial:
    """`batches()` are for the loop, each followed by a call of `take`; `fault` is then what was found, if anything."""

    def __init__(self, tried: LossTrial, settings: OptimizerSettings) -> None:
        self._inputs, self._tolerance, self._settings = tried.inputs, tried.tolerance, settings
        self.fault: UsageError | None = None
        self._model = tried.inputs.model
        self._kept = list_kept(self._model)
        self._taken: list[tuple[float, list[float]]] = []
        self._before: list[torch.Tensor] = []
        self._wild: list[torch.Tensor] = []
        self._others: list[list[torch.Tensor]] = []
        self._memory = kept.KeptNames(self._model, kept.list_caller_spaces)
        self._place: kept.KeptPlace | None = None

    def batches(self) -> Generator[StepBatch, None, None]:
        trial = self._inputs
        count = min(FEW, trial.num_records, trial.global_batch)
        first, other = np.arange(count, dtype=np.int64), np.arange(trial.num_records - count, trial.num_records)
        step = int(trial.num_records > trial.global_batch)  # at step 0 a loop may evaluate, which takes its time
        for ids in (first, other, first):
            yield from self._one(ids, step)
            if ids is first:
                self._memory.look()
        for place in self._memory.list_changed() if self.fault is None else ():
            with kept.change(place):
                self._place = place
                yield from self._one(first, step)

    def _one(self, ids: Any, step: int) -> Generator[StepBatch, None, None]:
        trial = self._inputs
        batch = trial.reader.read(ids, epoch=0)
        with model_traits.restore_buffers(self._model):
            seeding.seed_all(trial.seed, 0, 0)
            self._wild = []
            yield StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, step=step, weight=1.0, trial=True)
            self._compare()

    def take(self, loss: torch.Tensor) -> None:
        """Takes the loss of the last batch, and gives the parameters other values."""
        self._taken.append((float(loss.detach().double().mean()), self._settings.values()))
        if len(self._taken) == 3 and self.fault is None:
            self.fault = self._find_memory(*self._taken[0], *self._taken[2])
        elif self._place is not None and self.fault is None and not kept.is_same(self._taken[2][0], self._taken[-1][0]):
            self.fault = kept.refuse(self._place, self._taken[2][0], self._taken[-1][0])
        self._before = [_glance(value) for value in self._parameters()]
        for value in self._parameters():
            flat = value.detach().view(-1)[:SEEN]
            signs = torch.arange(len(flat), device=flat.device) % 3 - 1
            flat.copy_(signs * WILD + torch.linspace(0.5, 1.0, len(flat), device=flat.device))
        self._wild = [_glance(value) for value in self._parameters()]
        self._others = [[_glance(value) for value in other.values()] for other in self._kept]

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (p for p in self._model.parameters() if p.is_floating_point() and p.is_contiguous())

    def _compare(self) -> None:
        if not self._wild:
            return
        if self.fault is None:
            self.fault = self._find_changes()
        with torch.no_grad():
            for value, before in zip(self._parameters(), self._before, strict=True):
                value.view(-1)[:SEEN].copy_(before)

    def _find_changes(self) -> UsageError | None:
        if not _equal(self._wild, self._parameters()):
            return UsageError(
                "the loop changes parameters itself after a step that was applied",
                hint=f"{_JOINS}: do it in the step() of an optimizer of your own",
            )
        for other, before in zip(self._kept, self._others, strict=True):
            now = list(other.values())
            if not _equal(before, now) and not _equal(self._wild, now):  # a copy of the weights is no memory
                return UsageError(
                    f"after a step that was applied the loop changes {other.what}, which only this worker has",
                    hint=f"{_JOINS}. {_AVERAGE}; make a second model that is trained a part of the model, with its "
                    "optimizer in trueline.JointOptimizer",
                )
        return None

    def _find_memory(
        self, loss: float, settings: list[float], again: float, settings_again: list[float]
    ) -> UsageError | None:
        if settings != settings_again:
            return UsageError(
                "the loop sets the optimizer's numbers (a learning rate) by what it counts or keeps itself: after a "
                f"step that was applied they are {settings_again} instead of {settings} for the same step",
                hint=f"{_JOINS}: give the scheduler to Elastic(scheduler=...), or compute them from batch.step",
            )
        if math.isfinite(loss) and abs(loss - again) > max(self._tolerance / 10, 1e-9) * max(abs(loss), abs(again)):
            return UsageError(
                f"after a step that was applied the loss of the same records is {again:.7g} instead of {loss:.7g}, "
                "with equal seeds and parameters: it uses something that the loop keeps from batch to batch",
                hint=f"{_JOINS}: count with batch.step or job.steps, and keep nothing else that the loss uses, or keep "
                "it in a buffer of the model",
            )
        return None


def list_kept(model: torch.nn.Module) -> list[Kept]:
    """What a loop may keep weights in, beside `model`, as far as Python's collector knows it: other modules, and dicts
    and lists with at least the shapes of the model's trainable parameters."""
    own, known = {id(module) for module in model.modules()}, gc.get_objects()
    others = [one for one in known if issubclass(type(one), torch.nn.Module) and "_parameters" in one.__dict__]
    inner = {id(part) for one in others for part in one._modules.values()}
    ours = {id(value) for value in (*model.parameters(), *model.buffers())}
    shapes = sorted(tuple(value.shape) for value in model.parameters() if value.requires_grad)
    found = [
        Kept(f"another module ({type(one).__name__})", partial(_own_tensors, one, ours))
        for one in others
        if id(one) not in own | inner
    ]
    rooms = (one for one in known if type(one) in _ROOMS and len(one) >= len(shapes) > 0)
    return found + [
        Kept("a copy of the weights", partial(_values, room)) for room in rooms if _holds(room, shapes, ours)
    ]


def _own_tensors(module: torch.nn.Module, ours: set[int]) -> list[torch.Tensor]:
    return [value for value in (*module.parameters(), *module.buffers()) if id(value) not in ours]


def _values(room: Any) -> list[torch.Tensor]:
    found = list(room.values()) if isinstance(room, dict) else list(room)
    return [value for value in found if isinstance(value, torch.Tensor)]


def _holds(room: Any, shapes: list[tuple[int, ...]], ours: set[int]) -> bool:
    """Whether a dict or list has tensors of its own of all `shapes`."""
    first = next(iter(room.values() if isinstance(room, dict) else room))
    if not isinstance(first, torch.Tensor) or isinstance(first, torch.nn.Parameter):
        return False
    values = _values(room)
    left = [tuple(value.shape) for value in values if id(value) not in ours]
    return all(left.count(shape) >= shapes.count(shape) for shape in set(shapes))


def _glance(value: torch.Tensor) -> torch.Tensor:
    """A copy of the first elements."""
    flat = value.detach()
    return (flat.view(-1) if flat.is_contiguous() else flat.flatten())[:SEEN].clone()


def _equal(before: Iterable[torch.Tensor], now: Iterable[torch.Tensor]) -> bool:
    glances, others = list(before), [_glance(value) for value in now]
    same = len(glances) == len(others)
    return same and all(torch.equal(one, other) for one, other in zip(glances, others, strict=True))


def spare_files() -> None:
    """Makes this process, a fork, write nothing more: files are /dev/null, and what would be sent ends it."""
    plain = builtins.open

    def open_nothing(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        writes = any(letter in mode for letter in "wax+")
        return plain(os.devnull if writes else file, mode.replace("x", "w"), *given, **named)

    def ignore(*_: Any, **__: Any) -> None:
        """Nothing is saved, moved or removed."""

    def end(*_: Any) -> None:
        os._exit(0)

    builtins.open = io.open = open_nothing
    for name in ("replace", "rename", "remove", "unlink"):
        setattr(os, name, ignore)
    torch.save = ignore
    for name in ("safetensors.torch", "safetensors.numpy"):
        if name in sys.modules:
            sys.modules[name].save_file = ignore  # type: ignore[attr-defined]
    sys.modules["socket"].socket.send = sys.modules["socket"].socket.sendall = end


def check_schedulers(optimizer: torch.optim.Optimizer, given: Any) -> None:
    """Raises UsageError for a scheduler of `optimizer` that is not `given` to the job, or a part of it."""
    known, left = set[int](), [given]
    while left:
        one = left.pop()
        if one is not None:
            known |= {id(one), id(vars(one))}
            left += getattr(one, "_schedulers", [])
    for part in (optimizer, *getattr(optimizer, "parts", ())):
        for holder in gc.get_referrers(part):
            held = holder if type(holder) is dict else getattr(holder, "__dict__", {})
            schedules = issubclass(type(holder), torch.optim.lr_scheduler.LRScheduler) or "last_epoch" in held
            if schedules and held.get("optimizer") is part and not {id(holder), id(held)} & known:
                raise UsageError(
                    "the optimizer has a scheduler that was not given to the job",
                    hint=f"{_JOINS}: write Elastic(scheduler=...), which advances it after each step, or drop it and "
                    "set the rate from batch.step",
                )
