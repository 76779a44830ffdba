"""Outputs inside of a model, by the names of its submodules: what a student learns beside its teacher's answers.

Source: Romero et al., FitNets, arXiv 1412.6550. The teacher is the recipe's eager model: a program has no names inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trueline.errors import RecipeError, UsageError, closest


class FeatureWatch:
    """Keeps the last output of each submodule of the student that `matches` names. `variances`: of the teacher's
    outputs over all records; those of a batch would make a step depend on how workers share it."""

    def __init__(self, matches: Mapping[str, str], variances: Sequence[float] = ()) -> None:
        self.matches, self._variances = dict(matches), variances
        self._seen: dict[str, torch.Tensor] = {}

    def attach(self, model: nn.Module) -> nn.Module:
        """Raises UsageError for a name that the model does not have."""
        watch_outputs(model, self.matches, self._seen)
        return model

    def measure_distance(self, taught: Sequence[torch.Tensor]) -> torch.Tensor:
        """[records] The mean squared difference to the teacher's outputs, in units of their variance. Raises
        RecipeError for outputs of other shapes."""
        total = torch.zeros(len(taught[0]))
        for (name, teacher), want, variance in zip(self.matches.items(), taught, self._variances, strict=True):
            have = self._seen.pop(name)
            if have.shape != want.shape:
                raise RecipeError(
                    f"'{name}' of the student returns {list(have.shape)}, '{teacher}' of its teacher "
                    f"{list(want.shape)}",
                    hint="match submodules whose outputs have one shape",
                )
            gap = (have - want.to(have)) ** 2 / max(variance, 1e-12)
            total = total.to(have) + gap.reshape(len(have), -1).mean(dim=1)
        return total


def watch_outputs(model: nn.Module, names: Iterable[str], seen: dict[str, torch.Tensor]) -> None:
    """Each call of `model` puts the first output of each named submodule into `seen`. Raises UsageError."""
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            near = closest(name, modules)
            raise UsageError(
                f"match names '{name}', and the model has no submodule of that name",
                hint=f"did you mean '{near}'?" if near else "",
            )

        def keep(_: nn.Module, given: Any, output: Any, name: str = name) -> None:
            leaves = torch.utils._pytree.tree_leaves(output)
            seen[name] = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

        modules[name].register_forward_hook(keep)
