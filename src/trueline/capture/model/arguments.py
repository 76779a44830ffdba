"""The arguments of a call. torch's pytree takes a dataclass among them for a leaf until it is registered."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Arguments:
    """Positional and keyword arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def as_arguments(inputs: Any) -> Arguments:
    """How a model is called with `inputs`: a tensor, a tuple or list of them, or a dict."""
    register_dataclasses(inputs)
    if isinstance(inputs, Arguments):
        return inputs
    if isinstance(inputs, dict):
        return Arguments((), inputs)
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return Arguments(tuple(inputs))
    return Arguments((inputs,))


def register_dataclasses(value: Any) -> None:
    """Registers the dataclasses anywhere in `value` with torch, once in a process (torch.export.register_dataclass);
    those that torch or their maker registered (transformers' own outputs) are left as they are.

    >>> @dataclasses.dataclass
    ... class Answer:
    ...     logits: torch.Tensor
    >>> register_dataclasses([Answer(torch.zeros(2))])
    >>> len(pytree.tree_leaves(Answer(torch.zeros(2))))
    1
    """
    for leaf in pytree.tree_leaves(value):
        kind = type(leaf)
        if not dataclasses.is_dataclass(kind) or kind in pytree.SUPPORTED_NODES or isinstance(leaf, Mapping):
            continue
        torch.export.register_dataclass(kind)
        register_dataclasses([getattr(leaf, field.name, None) for field in dataclasses.fields(kind)])
