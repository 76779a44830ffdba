"""What a model does that depends on who is in its batch, or on when it is called.

Batch normalization looks at the neighbours of a record; dropout draws. With such a model the outcome of a step would
depend on how its records are split among workers, so they are split into shards that never change. Modules tell what
they are; what a forward does beside that is found out by trying one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from trueline import events
from trueline.data.loading import seeding
from trueline.errors import join_names

TRY_S, TRIES = 0.1, 5
"""For how long and how often a forward is timed before the first step; one that takes longer, once."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    draws: bool
    """A forward in training mode draws random numbers."""
    neighbours: bool
    """What a record's forward gives depends on the records beside it."""
    rate: float = 0.0
    """Records a second that were read and went forward when that was tried; 0: it was not."""

    @property
    def needs_shards(self) -> bool:
        return self.draws or self.neighbours


class _ShardNorm(_BatchNorm):
    """A SyncBatchNorm that looks at its shard alone; it takes the same shapes."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")


def replace_sync_batchnorm(model: torch.nn.Module) -> None:
    """Has each SyncBatchNorm of `model` take the statistics of a shard, as other normalization layers do.

    Its own collectives would wait for members that have no records, and for those that are dead.
    """
    layers = [name for name, module in model.named_modules() if type(module) is torch.nn.SyncBatchNorm]
    for name in layers:
        model.get_submodule(name).__class__ = _ShardNorm
    if layers:
        why = "each shard of a step has statistics of its own, whoever trains it; micro_batch says how large it is"
        events.emit("normalization.by_shard", layers=join_names(layers), why=why)


def read_traits(model: torch.nn.Module) -> ModelTraits:
    """What the kinds of its modules tell."""
    modules = list(model.modules())
    return ModelTraits(
        draws=any(_drops(module) for module in modules),
        neighbours=bool(_normalizing(model)),
    )


def try_forward(model: torch.nn.Module, forward: Callable[[], object], records: int) -> ModelTraits:
    """`read_traits`, and what a `forward` over some `records` showed; it leaves no trace in buffers and generators.

    A buffer outside of normalization layers that changes is reported: nobody can know how to merge it.
    """
    nature = read_traits(model)
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    with seeding.preserve_generators():
        before = seeding.generator_state()
        with torch.no_grad():
            forward()
        moved = seeding.generator_state() != before
    rate = _rate(forward, records)
    running = {id(buffer) for buffer in running_statistics(model)}
    for name, (buffer, copy) in buffers.items():
        changed = not torch.equal(buffer, copy)
        if changed and id(buffer) not in running and not name.endswith("num_batches_tracked"):
            why = "it changes in every forward and is not exchanged between workers; each keeps its own"
            events.emit("buffer.local", buffer=name, why=why)
        if changed:
            buffer.copy_(copy)
    return ModelTraits(draws=nature.draws or moved, neighbours=nature.neighbours, rate=rate)


def _rate(forward: Callable[[], object], records: int) -> float:
    """Of the fastest of a few more times: libraries are warm then; other workers still start on the same cores."""
    took_s: list[float] = []
    with seeding.preserve_generators(), torch.no_grad():
        while sum(took_s) < TRY_S and len(took_s) < TRIES:
            began = time.perf_counter()
            forward()
            took_s.append(max(time.perf_counter() - began, 1e-9))
    return records / min(took_s)


def running_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """Running means and variances of the normalization layers, in the order of the modules."""
    pairs = [(layer.running_mean, layer.running_var) for layer in _normalizing(model)]
    return [value for pair in pairs for value in pair if value is not None]


def batch_counters(model: torch.nn.Module) -> list[torch.Tensor]:
    """How many batches the normalization layers have seen: a step is one."""
    return [layer.num_batches_tracked for layer in _normalizing(model) if layer.num_batches_tracked is not None]


def _normalizing(model: torch.nn.Module) -> list[_NormBase]:
    """Normalization layers that look at a batch: one in evaluation mode within a model in training mode is frozen."""
    layers = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [layer for layer in layers if layer.training or not model.training]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """`model` in evaluation mode; afterwards each module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _drops(module: torch.nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, torch.nn.MultiheadAttention | torch.nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, torch.nn.RReLU)
