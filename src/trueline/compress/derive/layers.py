"""A ready student: the teacher's model without some of its equal layers, which begins with the weights of the others.

Layers of a residual network can be left out where successive ones compute nearly the same (Sanh et al., DistilBERT,
arXiv 1910.01108, take every second one). The first and the last stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from trueline.errors import UsageError, closest, join_names

_STACKS = (nn.ModuleList, nn.Sequential)


def choose_kept(model: nn.Module, text: str) -> dict[str, list[int]]:
    """The layers that stay, by the stack's name. `text`: `0.5`, the share to leave out of the largest stack, or
    `encoder.layers=0.5`. Raises UsageError.

    >>> choose_kept(nn.Sequential(*(nn.Linear(2, 2) for _ in range(6))), "0.5")
    {'': [0, 2, 5]}
    """
    name, separator, share_text = text.rpartition("=")
    stacks = list_stacks(model)
    try:
        share = float(share_text)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise UsageError(f"drop is '{text}', expected a share between 0 and 1", hint="--drop 0.5 or encoder.layers=0.5")
    if separator and name not in stacks:
        near = closest(name, stacks)
        raise UsageError(
            f"drop names '{name}', which is no stack of equal layers (there are: {join_names(map(repr, stacks))})",
            hint=f"did you mean '{near}'?" if near else "",
        )
    if not stacks:
        raise UsageError(
            "the model has no stack of three or more equal layers to leave some out of",
            hint="write the student's recipe: --distill student/recipe.py",
        )
    chosen = name if separator else max(stacks, key=lambda one: _count(model.get_submodule(one)))
    count = len(stacks[chosen])
    kept = min(count - 1, max(2, round(count * (1 - share))))
    return {chosen: [at * (count - 1) // (kept - 1) for at in range(kept)]}


def list_stacks(model: nn.Module) -> dict[str, Sequence[nn.Module]]:
    """Lists of at least three layers of one class that have parameters, by name."""
    found: dict[str, Sequence[nn.Module]] = {}
    for name, stack in model.named_modules():
        layers = list(stack.children())
        if type(stack) in _STACKS and len(layers) > 2 and len({type(one) for one in layers}) == 1 and _count(layers[0]):
            found[name] = layers
    return found


def drop_layers(model: nn.Module, kept: Mapping[str, Sequence[int]]) -> nn.Module:
    """`model` with the layers of each stack that `kept` has. Raises UsageError for another model's names."""
    stacks = list_stacks(model)
    for name, places in kept.items():
        if name not in stacks or max(places) >= len(stacks[name]):
            raise UsageError(f"the model has no stack '{name}' of {max(places) + 1} layers or more")
        stack = model.get_submodule(name)
        left = [layer for at, layer in enumerate(stacks[name]) if at in places]
        made = type(stack)(left) if isinstance(stack, nn.ModuleList) else nn.Sequential(*left)
        if not name:
            return made
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)
    return model


def _count(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())
