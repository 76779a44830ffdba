"""Quantization-aware training: the weights and inputs of a layer are rounded to int8 in its forward while it trains.

The gradient passes the rounding as if it were not there (straight-through; Jacob et al., arXiv 1712.05877). A weight
has a scale for each output channel, as the static quantizer gives it, so a trained weight is on the quantizer's own
grid, also when a batch norm is folded into it. The ranges of inputs are measured once, on training records before the
training, and stand in the plan: they are the same in every worker, and no buffer has to follow the membership. In
evaluation inputs are clamped and not rounded, so a captured program has no rounding that depends on its inputs, and
the static quantizer finds the ranges again. The names in the state_dict stay those of the recipe's model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrize import type_before_parametrizations

from trueline import events, files
from trueline.capture.model.arguments import as_arguments
from trueline.checkpoint.checkpoint import load_model
from trueline.compress.derive.plan import DERIVED, RATE, SHORTER, DerivePlan
from trueline.errors import CaptureError, UsageError
from trueline.recipe.eager_mode import as_trained
from trueline.recipe.load import load_recipe
from trueline.storage.location import parse_location

if TYPE_CHECKING:
    from trueline.data.source import Source
    from trueline.recipe.contract import Recipe

Range = tuple[float, float]
_WEIGHT_LEVELS, _INPUT_LEVELS = 127, 255
_RECORDS, _BATCH = 512, 64
"""Training records by which ranges are measured, and how many at a time."""
_VALUES = 4096
"""Of a layer's input to one batch, for its range."""
_OUTSIDE = 1e-4
"""Share of the values that a range leaves out at each end."""


def _round_both(layer: Any, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and weight as the layer multiplies them."""
    weight = round_weight(layer.weight)
    if layer.training:
        weight = layer.weight + (weight - layer.weight).detach()
    return round_input(given, layer.input_range, rounding=layer.training), weight


def _convolve(layer: Any, given: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", layer._conv_forward(*_round_both(layer, given), layer.bias))


class QatLinear(nn.Linear):
    input_range: Range

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(*_round_both(self, input), self.bias)


class QatConv1d(nn.Conv1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _convolve(self, input)


class QatConv2d(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _convolve(self, input)


class QatConv3d(nn.Conv3d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _convolve(self, input)


_QAT: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.Linear: QatLinear, nn.Conv1d: QatConv1d, nn.Conv2d: QatConv2d, nn.Conv3d: QatConv3d,
}  # fmt: skip


def round_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out, ...] on its grid: -127 to 127 times a scale of each output channel.

    >>> round_weight(torch.tensor([[1.27, 0.004], [0.0, 0.0]]))
    tensor([[1.2700, 0.0000],
            [0.0000, 0.0000]])
    """
    scale = weight.detach().flatten(1).abs().amax(dim=1).clamp_min(1e-12) / _WEIGHT_LEVELS
    scale = scale.reshape(-1, *[1] * (weight.ndim - 1))
    return (weight / scale).round() * scale


def round_input(given: torch.Tensor, within: Range, *, rounding: bool) -> torch.Tensor:
    """`given` clamped to `within`, and on 256 levels of that range where `rounding`; the gradient is the clamp's."""
    low, high = min(within[0], 0.0), max(within[1], 0.0)
    clamped = given.clamp(low, high)
    scale = (high - low) / _INPUT_LEVELS
    if not rounding or not scale:
        return clamped
    zero = round(-low / scale)
    levels = ((clamped.detach() / scale).round() + zero).clamp(0, _INPUT_LEVELS)
    return clamped + ((levels - zero) * scale - clamped).detach()


def prepare_qat(model: nn.Module, ranges: Mapping[str, Range]) -> nn.Module:
    """`model`, with the layers that `ranges` names rounding as they train. Raises CaptureError for a name that is no
    linear or convolutional layer."""
    for name, within in ranges.items():
        layer = dict(model.named_modules()).get(name)
        if layer is None or type_before_parametrizations(layer) not in _QAT:
            raise CaptureError(
                f"the plan rounds inputs of layer '{name}', which is no linear or convolutional layer of the model",
                hint="the recipe's model has changed: write the plan again",
            )
        layer.__class__ = _make_class(layer)
        cast("Any", layer).input_range = within
    return model


def _make_class(layer: nn.Module) -> type[nn.Module]:
    """The class that rounds, for a layer with masks too: those are properties of a class of its own."""
    plain, masked = type_before_parametrizations(layer), type(layer)
    if masked is plain:
        return _QAT[plain]
    kept = {name: value for name, value in vars(masked).items() if name not in ("__dict__", "__weakref__", "__doc__")}
    return type(masked.__name__, (_QAT[plain],), kept)


def measure_ranges(model: nn.Module, source: Source) -> dict[str, Range]:
    """The middle 99.98 % of what each linear and convolutional layer gets from training records, by its name. Raises
    CaptureError for a model without such a layer, or one whose numbers are not finite."""
    picked = np.unique(np.linspace(0, source.num_records - 1, _RECORDS).astype(np.int64))
    with _watch(model) as seen, torch.no_grad(), as_trained():
        for at in range(0, len(picked), _BATCH):
            arguments = as_arguments(source.read(picked[at : at + _BATCH]).inputs)
            model(*arguments.args, **arguments.kwargs)
            events.emit("ranges.measured", done=min(at + _BATCH, len(picked)), total=len(picked))
    if not seen:
        raise CaptureError(
            "no linear or convolutional layer of this model is called, and only these compute in int8",
            hint="compress it without --qat",
        )
    return {name: _find_range(name, values) for name, values in seen.items()}


@contextmanager
def _watch(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    seen: dict[str, list[torch.Tensor]] = {}

    def note(name: str, given: tuple[Any, ...]) -> None:
        values = given[0].detach().flatten()
        seen.setdefault(name, []).append(values[:: max(1, len(values) // _VALUES)].float())

    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: note(name, given))
        for name, layer in model.named_modules()
        if type_before_parametrizations(layer) in _QAT
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _find_range(name: str, values: list[torch.Tensor]) -> Range:
    found = torch.cat(values).numpy()
    if not np.isfinite(found).all():
        raise CaptureError(f"layer '{name}' gets numbers that are not finite from training records")
    low, high = np.quantile(found, [_OUTSIDE, 1 - _OUTSIDE])
    return float(low), float(high)


def plan_qat(recipe: Recipe, where: str, checkpoint: str | Path) -> DerivePlan:
    """The plan to train `recipe`, which lies at `where`, further from `checkpoint`. Raises CheckpointError,
    CaptureError, DataError."""
    ranges = measure_ranges(load_model(recipe, parse_location(checkpoint)), recipe.source("training"))
    epochs = max(1, recipe.defaults.epochs // SHORTER)
    return DerivePlan(kind="qat", recipe=where, checkpoint=str(checkpoint), ranges=ranges, epochs=epochs, rate=RATE)


def write_qat_recipe(recipe: str | Path | Recipe, checkpoint: str | Path) -> Path:
    """Writes NAME-qat.py beside the recipe's file: the recipe whose model, started from `checkpoint`, trains for int8.

    Training it is a job like any other (`trueline.train(path, weights=checkpoint)`), and its checkpoints have the names
    and shapes of the recipe's own model. Raises UsageError, RecipeError, CheckpointError, DataError, CaptureError.
    """
    loaded = load_recipe(recipe)
    if loaded.path is None:
        raise UsageError(
            f"recipe '{loaded.name}' has no file, and the one that trains for int8 is written beside it",
            hint="put the recipe into a file",
        )
    file = Path(loaded.path)
    out = file.with_name(f"{file.stem}-qat.py")
    if out.exists() and DERIVED not in out.read_text(errors="replace")[: len(DERIVED) + 3]:
        raise UsageError(f"{out} exists already, and Trueline did not write it", hint="give that file another name")
    plan = msgspec.structs.replace(plan_qat(loaded, file.name, checkpoint), checkpoint="")  # --weights brings it
    files.write_atomic(out, plan.text.encode())
    return out
