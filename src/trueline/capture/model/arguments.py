"""The arguments of a call. torch's pytree takes a dataclass among them, or a class that extends dict, for a leaf until
it is registered."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping
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
    register_containers(inputs)
    if isinstance(inputs, Arguments):
        return inputs
    if isinstance(inputs, dict):
        return Arguments((), inputs)
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return Arguments(tuple(inputs))
    return Arguments((inputs,))


def register_containers(value: Any) -> None:
    """Registers the dataclasses and the classes that extend dict anywhere in `value` with torch, once in a process;
    those that torch or their maker registered (transformers' own outputs) are left as they are.

    >>> @dataclasses.dataclass
    ... class Answer:
    ...     logits: torch.Tensor
    >>> class Answers(dict): ...
    >>> register_containers([Answer(torch.zeros(2)), Answers(logits=torch.zeros(2))])
    >>> len(pytree.tree_leaves([Answer(torch.zeros(2)), Answers(logits=torch.zeros(2))]))
    2
    """
    for leaf in pytree.tree_leaves(value):
        kind = type(leaf)
        if kind in pytree.SUPPORTED_NODES:
            continue
        if isinstance(leaf, dict):
            _register_mapping(kind)
            register_containers(list(leaf.values()))
        elif dataclasses.is_dataclass(kind) and not isinstance(leaf, Mapping):
            torch.export.register_dataclass(kind)
            register_containers([getattr(leaf, field.name, None) for field in dataclasses.fields(kind)])


def _register_mapping(kind: type[dict[Any, Any]]) -> None:
    """Registers a class that extends dict, as torch has dict itself: by its keys in their order."""
    own: Any = OrderedDict if issubclass(kind, OrderedDict) else dict

    def flatten(value: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
        return list(own.values(value)), list(own.keys(value))

    def flatten_with_keys(value: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
        return [(pytree.MappingKey(key), one) for key, one in own.items(value)], list(own.keys(value))

    def unflatten(values: Iterable[Any], keys: Any) -> dict[Any, Any]:
        made = kind.__new__(kind)
        for key, value in zip(keys, values, strict=True):
            own.__setitem__(made, key, value)
        return made

    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
