"""Unstructured pruning: the smallest weights of a layer are zero, and stay zero while the rest is trained further.

The weights are chosen by torch.nn.utils.prune. The mask is a parametrization, not torch's forward hook, so that a step
of the optimizer cannot revive a weight. A program with masks has as many numbers as before and is no faster: ONNX
Runtime has no kernels for sparse weights on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from trueline.compress.derive.plan import GLOBAL
from trueline.errors import UsageError, closest, join_names

_KINDS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    "linear": (nn.Linear,),
    "embedding": (nn.Embedding,),
}


class ZeroMask(nn.Module):
    """Multiplies a weight with zeros and ones."""

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


@dataclass(frozen=True, slots=True)
class MaskGroup:
    """Layers of which each, or all `together`, lose the share `amount`."""

    layers: Sequence[nn.Module]
    amount: float
    together: bool


def mask(model: nn.Module, amounts: Mapping[str, float]) -> nn.Module:
    """`model` with masks of all of `amounts`. Raises UsageError."""
    add_masks(model, amounts, 1.0)
    return model


def add_masks(model: nn.Module, amounts: Mapping[str, float], reached: float) -> list[MaskGroup]:
    """Gives `model` masks; `amounts` are shares by kind of layer (conv, linear, embedding), name of a module, or
    `global`, for which all layers compete; `reached` of them is zero now. A layer gets the share of the name that says
    most about it: its own, its container's, its kind's, `global`. Returns the layers. Raises UsageError for a name that
    chooses no layer."""
    groups = []
    for name, amount in sorted(amounts.items(), key=lambda item: _rank(item[0])):
        group = MaskGroup(choose_layers(model, name), amount, name == GLOBAL)
        for layer in group.layers:
            ones = torch.ones_like(layer.get_parameter("weight").detach())
            parametrize.register_parametrization(layer, "weight", ZeroMask(ones))
        groups.append(group)
    raise_masks(groups, reached)
    return groups


def _rank(name: str) -> int:
    """Small is specific."""
    return 2 if name == GLOBAL else 1 if name in _KINDS else -name.count(".")


def raise_masks(groups: Sequence[MaskGroup], reached: float) -> None:
    """Sets the smallest weights to zero until `reached` of each group's amount is. What is zero stays so."""
    for group in groups:
        weights = [cast("torch.Tensor", layer.weight).detach() for layer in group.layers]
        if group.together:
            found = _choose_weights(torch.cat([one.flatten() for one in weights]), group.amount * reached)
            pieces = list(torch.split(found, [one.numel() for one in weights]))
        else:
            pieces = [_choose_weights(one, group.amount * reached) for one in weights]
        for layer, weight, piece in zip(group.layers, weights, pieces, strict=True):
            masked: Any = layer
            masked.parametrizations.weight[0].mask.copy_(piece.reshape(weight.shape))


class MaskSchedule:
    """Raises the masks while the model trains: fast at first, slower as less is left (Zhu and Gupta, arXiv 1710.01878).

    The steps are counted in the optimizer's first group, and masks are buffers of the model, so that a worker that
    joins gets both with the state, and a resumed job continues. All members hold the same weights, so they choose the
    same.
    """

    UNTIL = 0.6
    """Share of the training in which the amounts are reached; the rest heals."""

    def __init__(self, amounts: Mapping[str, float], rounds: int, steps: int) -> None:
        self._amounts, self._rounds = amounts, rounds
        self._every = max(1, int(self.UNTIL * steps / rounds))
        self._groups: list[MaskGroup] = []

    def attach(self, model: nn.Module) -> nn.Module:
        """`model` with the masks of the first round."""
        self._groups = add_masks(model, self._amounts, self._share_at(0))
        return model

    def follow(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """`optimizer`, whose steps raise the masks of the model that was made last."""
        groups = self._groups
        optimizer.param_groups[0].setdefault(_STEPS, 0)

        def count(stepped: Any, *_: Any) -> None:
            done = stepped.param_groups[0][_STEPS] = stepped.param_groups[0].get(_STEPS, 0) + 1
            number, rest = divmod(done, self._every)
            if rest == 0 and number < self._rounds:
                raise_masks(groups, self._share_at(number))

        optimizer.register_step_post_hook(count)
        return optimizer

    def _share_at(self, number: int) -> float:
        return float(1 - (1 - (number + 1) / self._rounds) ** 3)


_STEPS = "masked_steps"


def _choose_weights(weights: torch.Tensor, amount: float) -> torch.Tensor:
    """Zeros where the smallest are, ones elsewhere."""
    method: Any = prune.L1Unstructured(amount)
    found: torch.Tensor = method.compute_mask(weights, torch.ones_like(weights))
    return found


def choose_layers(model: nn.Module, name: str) -> list[nn.Module]:
    """The layers that `name` means, each with a weight of its own. Raises UsageError where there is none."""
    usual = tuple(kind for kinds in (_KINDS["conv"], _KINDS["linear"]) for kind in kinds)
    kinds = usual if name == GLOBAL else _KINDS.get(name, ())
    modules = dict(model.named_modules())
    found = [module for module in modules.values() if isinstance(module, kinds)] if kinds else []
    if not kinds and name in modules:
        found = [one for one in modules[name].modules() if isinstance(one, usual + _KINDS["embedding"])]
    left = [one for one in found if not parametrize.is_parametrized(one, "weight")]
    if found and not left:
        raise UsageError(f"prune names '{name}', and each of its layers has a share by a more specific name")
    if not found:
        known = [*_KINDS, GLOBAL, *(key for key, one in modules.items() if key and isinstance(one, usual))]
        near = closest(name, known)
        raise UsageError(
            f"prune names '{name}', and the model has no such layer (has: {join_names(known[:12])})",
            hint=f"did you mean '{near}'?" if near else "",
        )
    return left


def make_permanent(model: nn.Module) -> nn.Module:
    """`model` with the masks multiplied into its weights, and no parametrization."""
    for layer in model.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return model
