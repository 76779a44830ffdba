"""Unstructured pruning: the smallest weights of a layer are zero, and stay zero while the rest is trained further.

The weights are chosen by torch.nn.utils.prune. The mask is a parametrization, not torch's forward hook, so that a step
of the optimizer cannot revive a weight. A program with masks has as many numbers as before and is no faster: ONNX
Runtime has no kernels for sparse weights on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def mask(model: nn.Module, amounts: Mapping[str, float]) -> nn.Module:
    """`model` with masks; `amounts` are shares by kind of layer (conv, linear, embedding), name of a module, or
    `global`, for which all layers compete. Raises UsageError for a name that chooses no layer."""
    for name, amount in amounts.items():
        layers = choose_layers(model, name)
        weights = [layer.get_parameter("weight").detach() for layer in layers]
        if name == GLOBAL:
            found = _choose_weights(torch.cat([weight.flatten() for weight in weights]), amount)
            pieces = list(torch.split(found, [weight.numel() for weight in weights]))
        else:
            pieces = [_choose_weights(weight, amount) for weight in weights]
        for layer, weight, piece in zip(layers, weights, pieces, strict=True):
            parametrize.register_parametrization(layer, "weight", ZeroMask(piece.reshape(weight.shape)))
    return model


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
    found = [one for one in found if not parametrize.is_parametrized(one, "weight")]
    if not found:
        known = [*_KINDS, GLOBAL, *(key for key, one in modules.items() if key and isinstance(one, usual))]
        near = closest(name, known)
        raise UsageError(
            f"prune names '{name}', and the model has no such layer (has: {join_names(known[:12])})",
            hint=f"did you mean '{near}'?" if near else "",
        )
    return found


def make_permanent(model: nn.Module) -> nn.Module:
    """`model` with the masks multiplied into its weights, and no parametrization."""
    for layer in model.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return model
