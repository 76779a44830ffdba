"""Dataclasses as inputs and outputs: torch's pytree takes one for a leaf until it is told its fields.

Source: torch.export.register_dataclass. A class is registered once in a process, and only when a model was seen to take
or give it; one that torch or its maker knows already (transformers' own outputs) is left as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def know(value: Any) -> None:
    """Makes the dataclasses that stand anywhere in `value` known to torch, field by field.

    >>> @dataclasses.dataclass
    ... class Answer:
    ...     logits: torch.Tensor
    >>> know([Answer(torch.zeros(2))])
    >>> len(pytree.tree_leaves(Answer(torch.zeros(2))))
    1
    """
    for leaf in pytree.tree_leaves(value):
        kind = type(leaf)
        if not dataclasses.is_dataclass(kind) or kind in pytree.SUPPORTED_NODES or isinstance(leaf, Mapping):
            continue
        torch.export.register_dataclass(kind)
        know([getattr(leaf, field.name, None) for field in dataclasses.fields(kind)])
