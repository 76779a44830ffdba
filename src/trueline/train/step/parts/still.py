"""Runs a model without random numbers and without statistics of the batch, to see what its loss does with records.

Dropout layers keep everything, normalization layers scale each record by itself, and an operator that draws returns a
constant. What is left depends on the records alone, so the loss of a batch can be compared with those of its parts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from trueline.errors import join_names

CONSTANT = 0.5
"""What an operator draws while nothing may be drawn."""
SETTLED = 0.05
"""A parameter of this size or smaller holds back what it is multiplied with."""
MOST_UNSETTLED, NUDGED = 1 << 20, 1 << 12
"""Elements of a parameter that get other values for a while."""
_HALF = (torch.float16, torch.bfloat16)
_BOUNDS = frozenset(
    getattr(torch.ops.aten, f"{name}{place}")
    for name in ("relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "threshold", "leaky_relu", "abs")
    for place in ("", "_")
) | {torch.ops.aten.maximum, torch.ops.aten.minimum, torch.ops.aten.where}
"""Operators that are linear on either side of a bound."""
LOOKS = frozenset(getattr(torch.ops.aten, name) for name in ("gt", "ge", "lt", "le", "_local_scalar_dense"))
"""Operators that compare a number, or give it to Python."""
_ANSWERS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
"""Tags of operators that give Python a number (`torch.equal`), or a size that follows from values (`nonzero`)."""
_GIVES = ("tolist", "numpy", "__array__")
"""Methods of a tensor that give Python what it holds, past all operators."""
MOST_SUMMED = 1 << 16
"""Elements of what they give that are summed."""
BENT = 0.3
"""Of the square of its input, what an operator that is bent adds to its result."""
Bound = tuple[str, tuple[int, ...]]
"""Such an operator, and the shape of its result."""


class Bends(TypedDict, total=False):
    """What of a batch is bent (`WatchedOperators`)."""

    bend: Sequence[int]
    factors: Mapping[int, float]


class WatchedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether operators draw, and their precision; with `still` those that draw return a constant.

    `tosses`: whether code looks at a number after something was drawn, which may decide what it computes.
    `bend`: of the operators that have a bound and a gradient, by their number in a batch, those that are bent: their
    result is then no linear function of what they are given, on either side of the bound.
    `factors`: of the single numbers that code looks at or compares, by their place among these, those that are made
    larger or smaller.
    """

    def __init__(self, *, still: bool, **bends: Unpack[Bends]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = self.tosses = self.half = self.single = False
        self.bounds: list[Bound] = []
        self.numbers: list[float] = []
        self.glances: list[float] = []
        """What code looks at, whole numbers, lists, arrays and sizes too: each as one number."""
        self.constant = CONSTANT
        self.looks = False
        """Whether the code that runs is that of the loss."""
        self._still, self._bend, self._factors = still, bends.get("bend", ()), bends.get("factors", {})

    def begin(self) -> None:
        """Another batch begins; it was read in any precision."""
        self.draws, self.tosses, self.single, self.bounds, self.numbers = False, False, False, [], []
        self.glances = []
        self.looks = self._still

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._still and func.overloadpacket in _BOUNDS:
            return self._meet_bound(func, args, kwargs)
        if self.looks and func.overloadpacket in LOOKS:
            args = self._look_at(args)
        drawing = torch.Tag.nondeterministic_seeded in func.tags
        names = [argument.name for argument in func._schema.arguments] if drawing else []
        if "dropout_p" in names:  # attention kernels have the tag, and draw only for dropout
            given = dict(zip(names, args, strict=False)) | kwargs
            drawing = given.get("dropout_p", 0.0) > 0
            if drawing and self._still:
                args, kwargs = (), given | {"dropout_p": 0.0}
        self.tosses = self.tosses or (self.draws and func.overloadpacket is torch.ops.aten._local_scalar_dense)
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple | list) and result else result
        if self.looks and func.overloadpacket not in LOOKS and any(tag in func.tags for tag in _ANSWERS):
            self.glances.append(float(first.numel() if isinstance(first, torch.Tensor) else first))
        if isinstance(first, torch.Tensor):
            self.half, self.single = self.half or first.dtype in _HALF, self.single or first.dtype == torch.float32
        if not drawing:
            return (
                _reverse_ties(result, args, kwargs, self.constant)
                if self._still and func.overloadpacket in _SORTS
                else result
            )
        self.draws = True
        return (
            _fill(func.overloadpacket.__name__, args, result, self.constant)
            if self._still and "dropout_p" not in names
            else result
        )

    def _look_at(self, args: Any) -> Any:
        """Notes a number that is about to be compared or given to Python; the arguments with what replaces it."""
        value = args[0]
        if not isinstance(value, torch.Tensor) or value.is_complex() or value.numel() != 1:
            return args
        self.glances.append(float(value.flatten().tolist()[0]))
        if not value.is_floating_point():
            return args
        factor = self._factors.get(len(self.numbers), 1.0)
        self.numbers.append(self.glances[-1])
        return args if factor == 1.0 else (value.detach() * factor, *args[1:])

    def _meet_bound(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [one for one in args if isinstance(one, torch.Tensor) and one.requires_grad and one.is_floating_point()]
        number = len(self.bounds)
        more = sum(BENT * one.detach().square() for one in given) if given and number in self._bend else None
        result = func(*args, **kwargs)
        if given:
            self.bounds.append((func.overloadpacket.__name__, tuple(result.shape)))
        return result if more is None else result.add_(more)


@contextmanager
def _watch_methods(watched: WatchedOperators) -> Iterator[None]:
    """Notes in this block what methods of tensors give to Python."""
    own = {name: vars(torch.Tensor)[name] for name in _GIVES if name in vars(torch.Tensor)}

    def replace(plain: Callable[..., Any]) -> Callable[..., Any]:
        def give(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            looks, watched.looks = watched.looks, False  # one calls another
            try:
                found = plain(value, *args, **kwargs)
            finally:
                watched.looks = looks
            if looks and not value.is_complex():
                some = np.asarray(found, dtype=np.float64).reshape(-1)[:MOST_SUMMED]
                watched.glances.append(float(np.nan_to_num(some).sum()))
            return found

        return give

    for name in _GIVES:
        setattr(torch.Tensor, name, replace(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name in _GIVES:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)


_SORTS = (torch.ops.aten.sort, torch.ops.aten.argsort)


def _reverse_ties(result: Any, args: Any, kwargs: Any, constant: float) -> Any:
    """Sorting what was drawn makes a permutation; of equal values its order is any, and here the reverse."""
    values = args[0]
    if values.dim() and values.numel() and bool((values == constant).all()):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        indices = result if isinstance(result, torch.Tensor) else result[1]
        order = torch.arange(values.shape[dim] - 1, -1, -1, dtype=indices.dtype, device=indices.device)
        indices.transpose(dim, -1).copy_(order)
    return result


def _fill(name: str, args: Any, result: Any, constant: float) -> Any:
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if name.startswith("rrelu"):
        args[1].fill_(1.0)  # its noise, which the backward multiplies with
        return args[0].clone()
    if name.startswith("randperm"):  # each record meets another: a loop that mixes records is seen
        return result.copy_(torch.arange(len(result) - 1, -1, -1, dtype=result.dtype, device=result.device))
    if not isinstance(result, torch.Tensor):
        return result
    return result.fill_(constant if result.is_floating_point() else result.dtype == torch.bool)


def _scale_alone(layer: _BatchNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(values: torch.Tensor) -> torch.Tensor:
        size = values.float().square().mean(dim=tuple(range(1, values.dim())), keepdim=True)
        unused = sum(value.sum() for value in layer.parameters())  # none of its parameters is without a gradient
        return (values * torch.rsqrt(size + 1.0) + 0.0 * unused).to(values.dtype)

    return forward


@contextmanager
def without_draws(model: torch.nn.Module, **bends: Unpack[Bends]) -> Iterator[WatchedOperators]:
    """Layers and operators draw nothing and look at no other records in this block, whatever mode the loop sets."""
    changed: list[tuple[torch.nn.Module, str, float]] = []
    normalizing = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in model.modules():
        name = "p" if isinstance(module, _DropoutNd) else "dropout"
        if isinstance(module, _DropoutNd | torch.nn.RNNBase | torch.nn.MultiheadAttention):
            changed.append((module, name, getattr(module, name)))
            setattr(module, name, 0.0)
    for layer in normalizing:
        layer.forward = _scale_alone(layer)  # type: ignore[assignment, method-assign]
    try:
        with WatchedOperators(still=True, **bends) as watched, _watch_methods(watched):
            yield watched
    finally:
        for layer in normalizing:
            del layer.forward
        for module, name, value in changed:
            setattr(module, name, value)


@contextmanager
def unsettle(model: torch.nn.Module, nudge: float = 1.0) -> Iterator[str]:
    """Gives parameters that are constant (gates at zero, scales of one) other values in this block; yields their names.

    What such a parameter holds back in the first step, such as a head that compares records, shows then. The first
    elements of the others are multiplied by `nudge`.
    """
    made, changed = torch.Generator().manual_seed(0), list[tuple[str, torch.Tensor, torch.Tensor]]()
    with torch.no_grad():
        for name, value in model.named_parameters():
            first = value.detach().reshape(-1)[:1]
            if not value.is_floating_point() or not value.is_contiguous() or not value.numel():
                continue
            flat = value.detach().view(-1)
            if bool((flat[:MOST_UNSETTLED] == first).all()) and (flat.numel() == 1 or bool((flat == first).all())):
                part = flat[:MOST_UNSETTLED]
                noise = torch.rand(part.shape, generator=made).to(part.device, part.dtype)
                changed.append((name, part, first.clone()))
                part.copy_(first * (0.7 + 0.6 * noise) if abs(float(first)) > SETTLED else noise - 0.5)
            elif nudge != 1.0:
                changed.append(("", flat[:NUDGED], flat[:NUDGED].clone()))
                flat[:NUDGED].mul_(nudge)
    try:
        yield join_names([name for name, _, _ in changed if name])
    finally:
        with torch.no_grad():
            for _, part, content in changed:
                part.copy_(content.expand_as(part))
