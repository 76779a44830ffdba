"""Whether a model's forward depends on the other records in the batch, or draws random numbers.

Batch normalization depends on the batch; dropout draws. With such a model the result of a step would depend on how its
records are split among workers, so they are split into fixed shards. The module types show it; for the model's own code
one forward is tried.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from trueline import events
from trueline.data.loading import seeding
from trueline.data.loading.random_state import generator_state
from trueline.errors import UsageError, join_names

TRY_S, TRIES = 0.1, 5
"""Limits of the timing of forwards before the first step; one that takes longer runs once."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    draws: bool  # a forward in training mode draws random numbers
    neighbours: bool  # the result for a record depends on the records beside it
    rate: float = 0.0  # records a second of the tried forward, reading included; 0: none was tried
    reduction: str = "mean"  # how losses of parts make the loss of a step (`reduction.py`)
    even: bool = False  # whether each cross entropy of the trial divided by its number of labels
    whole: bool = False  # whether the trial of the loss did not confirm that, for any part
    buffers: tuple[str, ...] = ()  # changed by a forward, outside of normalization layers
    skips: bool = False  # some batches leave out parameters that others use, as layers that are dropped at random do
    half: bool = False  # a loop computes in half precision, and no setting says so
    form: str = ""  # of a mean: the operations at the top of a loss (`reduction.Divisors`)
    divisors: Sequence[Any] = ()  # and a rule for what each of them divides by
    looks: Sequence[Any] = ()  # what all records had in common that were looked at (`features.Column`)
    off: float = 0.0  # how far the last losses of parts were from the whole
    numbers: Sequence[int] = ()  # that code looks at, by their places, and that follow from a batch (`double.py`)
    glances: bool = False  # whether its code looks at anything that it computes (`extremes.py`)
    reads: dict[str, Any] = field(default_factory=dict)  # what a loss reads and is in the first worker (`alike.py`)
    records: dict[str, Any] = field(default_factory=dict)  # sums over some that the first worker has read

    @property
    def needs_shards(self) -> bool:
        return self.draws or self.neighbours or self.whole or self.half


class _ShardNorm(_BatchNorm):
    """A SyncBatchNorm that normalizes its shard alone; it takes the same shapes."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")


def replace_sync_batchnorm(model: torch.nn.Module) -> None:
    """Makes each SyncBatchNorm normalize a shard: its collectives would wait for members without records, or dead."""
    layers = [name for name, module in model.named_modules() if type(module) is torch.nn.SyncBatchNorm]
    for name in layers:
        model.get_submodule(name).__class__ = _ShardNorm
    if layers:
        why = "each shard of a step has statistics of its own, on whichever worker; micro_batch sets its size"
        events.emit("normalization.by_shard", layers=join_names(layers), why=why)


def read_traits(model: torch.nn.Module) -> ModelTraits:
    """The traits that the module types show."""
    return ModelTraits(draws=any(map(_drops, model.modules())), neighbours=bool(_normalizing(model)))


def try_forward(model: torch.nn.Module, forward: Callable[[], object], records: int) -> ModelTraits:
    """`read_traits`, and what `forward` over `records` records shows; buffers and generators are restored."""
    nature = read_traits(model)
    with restore_buffers(model):
        with seeding.preserve_generators():
            before = generator_state()
            with torch.no_grad():
                forward()
            moved = generator_state() != before
        rate = _rate(forward, records)
    return ModelTraits(draws=nature.draws or moved, neighbours=nature.neighbours, rate=rate)


def _rate(forward: Callable[[], object], records: int) -> float:
    """The best of a few more runs: libraries are warm by then, but other workers still start on the same cores."""
    took_s: list[float] = []
    with seeding.preserve_generators(), torch.no_grad():
        while sum(took_s) < TRY_S and len(took_s) < TRIES:
            began = time.perf_counter()
            forward()
            took_s.append(max(time.perf_counter() - began, 1e-9))
    return records / min(took_s)


def explain_single(error: Exception, records: int) -> UsageError | None:
    """Why a normalization layer refuses a batch of one record; None for other errors."""
    if not isinstance(error, ValueError) or "Expected more than 1 value per channel" not in str(error):
        return None
    return UsageError(
        f"a batch normalization layer has {records} record in a batch of its own, and so no variance: {error}",
        hint="choose global_batch so that the last step of an epoch has more records (or micro_batch: a shard has its "
        "own statistics), or use a layer that normalizes each record, such as GroupNorm",
    )


def count_fewest(num_records: int, global_batch: int, shard_records: int) -> int:
    """The fewest records of a shard of any step.

    >>> count_fewest(61, 12, 4), count_fewest(60, 12, 5)
    (1, 4)
    """
    steps = {min(global_batch, num_records), num_records % global_batch or min(global_batch, num_records)}
    return min(count // -(-count // shard_records) for count in steps)


def running_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """Running means and variances of the normalization layers, in the order of the modules."""
    pairs = [(layer.running_mean, layer.running_var) for layer in _normalizing(model)]
    return [value for pair in pairs for value in pair if value is not None]


def batch_counters(model: torch.nn.Module) -> list[torch.Tensor]:
    """The counters of batches in the normalization layers: a step is one batch."""
    return [layer.num_batches_tracked for layer in _normalizing(model) if layer.num_batches_tracked is not None]


def _normalizing(model: torch.nn.Module) -> list[_NormBase]:
    """The layers that normalize over a batch: one in evaluation mode within a model in training mode is frozen."""
    layers = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [layer for layer in layers if layer.training or not model.training]


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """A buffer of a module, whichever tensor it is at present: a forward may put another one in its place."""

    name: str
    module: torch.nn.Module
    key: str

    @property
    def value(self) -> torch.Tensor:
        found = self.module._buffers[self.key]
        assert found is not None
        return found

    def change(self, before: torch.Tensor) -> torch.Tensor:
        """[elements] What was added to the value `before`, in float64."""
        wide = torch.complex128 if before.is_complex() else torch.float64
        return _real(self.value.detach().to(wide)).flatten() - _real(before.to(wide)).flatten()

    def set(self, value: torch.Tensor, before: torch.Tensor, change: torch.Tensor | None = None) -> None:
        """Puts the tensor `value` in place, with the content `before`, changed by `change`."""
        self.module._buffers[self.key] = value
        if change is not None:
            wide = before.to(torch.complex128 if before.is_complex() else torch.float64)
            flat = _real(wide).flatten() + change.to(wide.device)
            changed = (
                torch.view_as_complex(flat.view(*before.shape, 2)) if before.is_complex() else flat.view_as(before)
            )
            exact = before.is_floating_point() or before.is_complex()
            before = changed if exact else changed.round()
        with torch.no_grad():
            value.copy_(before)


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def buffer_slots(model: torch.nn.Module, *, persistent: bool = True) -> list[BufferSlot]:
    """The buffers that are part of the model's state, or are not; without those of normalization layers."""
    own = {id(buffer) for buffer in (*running_statistics(model), *batch_counters(model))}
    return [
        BufferSlot(f"{path}.{key}" if path else key, module, key)
        for path, module in model.named_modules()
        for key, value in module._buffers.items()
        if value is not None and id(value) not in own and persistent == (key not in module._non_persistent_buffers_set)
    ]


@contextmanager
def restore_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Gives the model's buffers their tensors and values again after the block."""
    held = [(module, key, value, value.clone()) for module in model.modules()
            for key, value in module._buffers.items() if value is not None]  # fmt: skip
    try:
        yield
    finally:
        with torch.no_grad():
            for module, key, value, copy in held:
                module._buffers[key] = value
                value.copy_(copy)


def expect_same_training(trained: Sequence[torch.Tensor], frozen: Sequence[torch.Tensor], where: str) -> None:
    """Raises UsageError if the loop has frozen parameters that were `trained`, or thawed `frozen` ones."""
    turned = any(value.requires_grad for value in frozen)
    if turned or not all(value.requires_grad for value in trained):
        raise UsageError(
            f"the loop {'thaws' if turned else 'freezes'} parameters in {where}, and the members exchange the "
            "gradients of those that had requires_grad at the beginning",
            hint="give the part a parameter group of its own, with a learning rate of 0 while it is frozen: computed "
            "from batch.step before job.step(loss)",
        )


def expect_same_versions(model: torch.nn.Module, before: Sequence[int]) -> None:
    """Raises UsageError if a loop has changed parameters of `model` itself, whose versions were those `before`."""
    names = [name for (name, value), version in zip(model.named_parameters(), before, strict=True)
             if value._version != version]  # fmt: skip
    scaled = [name for name, part in model.named_modules() if getattr(part, "max_norm", None) is not None]
    if names and scaled:
        raise UsageError(
            f"the forward of '{scaled[0]}' scales down the rows that it reads (max_norm), and so changes the "
            "parameters or their gradients itself: other workers read other rows",
            hint="leave max_norm out, and scale in the forward (weight / weight.norm(...)), or in the step() of an "
            "optimizer of your own",
        )
    if names:
        raise UsageError(
            f"the loop changes the parameters or their gradients itself: {join_names(names)} while it computes a "
            "loss, which a worker that catches up would not do",
            hint="do it in the step() of an optimizer of your own, or compute with changed copies; job.step(loss) "
            "runs backward and optimizer",
        )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Puts `model` in evaluation mode; afterwards each module has its own mode again."""
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
