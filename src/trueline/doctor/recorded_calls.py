"""Calls of a module: arguments and answers as trees of tensors, recorded once and repeated.

A submodule is probed with the calls that it received while the whole model was probed: other batch sizes, other values,
extremes. A dimension whose size differs between these calls is free. Nothing here knows a program format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import Event
from trueline.runtime import compare
from trueline.runtime.tensors import restored_vmap_levels

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

MAX_RECORDED = 1000
"""Calls kept of one submodule: those in a loop repeat one kind of call."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """One call: its tensors, flat, and the rest. Calls with equal `form` differ in tensors only."""

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    """Leaves of (args, kwargs); `...` in the place of a tensor."""
    spec: Any

    @property
    def form(self) -> tuple[object, ...]:
        ranks = tuple((tensor.ndim, tensor.dtype) for tensor in self.tensors)
        return (str(self.spec), ranks, tuple(repr(leaf) for leaf in self.leaves))

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left = iter(tensors)
        leaves = [next(left) if leaf is ... else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    @property
    def sizes(self) -> str:
        """The shapes of the tensors, for messages."""
        return ", ".join(str(list(tensor.shape)) for tensor in self.tensors)


class FlatModule(torch.nn.Module):
    """`module` with a call's tensors in and the tensors of its answer out."""

    def __init__(self, module: torch.nn.Module, like: RecordedCall) -> None:
        super().__init__()
        self.module = module
        self.like = like

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.like.arguments(tensors)
        return flat_answer(self.module(*args, **kwargs))


def flat_answer(answer: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """A module's answer: arrays by position, or the error; and the way through its code."""

    arrays: dict[str, Array] | None
    error: str
    way: Sequence[Event] = field(default=(), repr=False)


def answer_of(function: Callable[..., Any], call: RecordedCall, *, watch: bool = False) -> RecordedAnswer:
    """Calls `function` with copies of the call's tensors; an exception is an answer too. With `watch`, so is an endless
    loop."""
    args, kwargs = call.arguments(tuple(tensor.clone() for tensor in call.tensors))
    way: Sequence[Event] = ()
    try:
        with torch.no_grad(), restored_vmap_levels():
            if watch:
                with code_paths.watch(ends=True) as way:
                    answer = function(*args, **kwargs)
            else:
                answer = function(*args, **kwargs)
        plain = (tensor.detach() for tensor in flat_answer(answer))
        numpy = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor for tensor in plain)  # which has none
        arrays = {f"output {index}": np.array(tensor.numpy()) for index, tensor in enumerate(numpy)}
        return RecordedAnswer(arrays=arrays, error="", way=way)
    except Exception as error:  # noqa: BLE001 (blind except): the user's forward on made-up values may raise anything
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return RecordedAnswer(arrays=None, error=f"{type(error).__name__}: {first}", way=way)


def agree(expected: RecordedAnswer, answer: RecordedAnswer) -> tuple[str, float]:
    """Why two answers disagree (empty when they agree), and the largest difference.

    Where the original raises, nothing is compared.
    """
    if expected.arrays is None:
        return "", 0.0
    if answer.arrays is None:
        return f"it raises {answer.error}", 0.0
    result = compare.compare(expected.arrays, answer.arrays)
    return result.reason, result.max_abs_error


@contextmanager
def recording(modules: dict[str, torch.nn.Module]) -> Iterator[dict[str, list[RecordedCall]]]:
    """Records the calls of each of `modules`, the first MAX_RECORDED, with copies of their tensors."""
    calls: dict[str, list[RecordedCall]] = {path: [] for path in modules}
    handles = []
    for path, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it accepts no hooks

        def record(module: torch.nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            if len(calls[path]) < MAX_RECORDED:
                leaves, spec = pytree.tree_flatten((args, kwargs))
                tensors = tuple(leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor))
                rest = tuple(... if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
                calls[path].append(RecordedCall(tensors=tensors, leaves=rest, spec=spec))

        handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def alike(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls of the most frequent form."""
    forms: dict[tuple[object, ...], list[RecordedCall]] = {}
    for call in calls:
        forms.setdefault(call.form, []).append(call)
    return max(forms.values(), key=len, default=[])


def free_dims(calls: Sequence[RecordedCall]) -> list[set[int]]:
    """For each tensor of calls that are alike: the dimensions whose sizes differ between calls."""
    shapes = zip(*([tensor.shape for tensor in call.tensors] for call in calls), strict=True)
    return [{axis for axis, sizes in enumerate(zip(*each, strict=True)) if len(set(sizes)) > 1} for each in shapes]


def base_call(calls: Sequence[RecordedCall], free: Sequence[set[int]]) -> RecordedCall:
    """The call to export with: free sizes of at least 2 (torch takes 0 and 1 for constants), as different as can be."""

    def score(call: RecordedCall) -> tuple[int, int]:
        sizes = [tensor.shape[axis] for tensor, axes in zip(call.tensors, free, strict=True) for axis in axes]
        return (-sum(size < 2 for size in sizes), len(set(sizes)))

    return max(calls, key=score)
