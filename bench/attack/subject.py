"""A model of the generator as the judge knows it: its text, fresh copies of it, and inputs of any size."""

from __future__ import annotations

import copy
import hashlib
import math
import types
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Array = npt.NDArray[Any]
Answer = list[Array] | str
"""The outputs in order, or what was raised."""
ULP = 1.2e-7
"""What an input or a weight of single precision may be off by when it is read."""


@dataclass
class Subject:
    """The source of a recipe file with `INPUTS`, `EXAMPLES`, `model()`, `as_called(batch)` and `inputs_of`."""

    text: str
    _code: Any = None
    _mine: types.ModuleType | None = None
    _answers: dict[str, Answer] = field(default_factory=dict)

    def module(self) -> types.ModuleType:
        """The file run anew: what it keeps at its top level begins again."""
        if self._code is None:
            self._code = compile(self.text, "<attack>", "exec")
        made = types.ModuleType("attack")
        exec(self._code, made.__dict__)
        return made

    @property
    def fields(self) -> dict[str, str]:
        return dict(self._own.INPUTS)

    @property
    def _own(self) -> Any:
        if self._mine is None:
            self._mine = self.module()
        return self._mine

    def examples(self) -> list[dict[str, Array]]:
        """The user's own, as arrays by name."""
        own = self._own
        called, own.as_called = own.as_called, lambda batch: batch
        try:
            return [{n: t.numpy().copy() for n, t in batch.items()} for batch in own.examples()]
        finally:
            own.as_called = called

    def model(self) -> Model:
        module = self.module()
        return Model(module.model(), module)

    def fresh(self, arrays: Mapping[str, Array]) -> Answer:
        """The answer of a copy that was never called; each program is asked the same, so answers are kept."""
        key = hashlib.sha256()
        for name, array in arrays.items():
            key.update(f"{name}{array.dtype}{array.shape}".encode())
            key.update(np.ascontiguousarray(array))
        kept = key.hexdigest()
        if kept not in self._answers:
            self._answers[kept] = self.model().answer(arrays)
        return self._answers[kept]


@dataclass
class Model:
    """A copy that is called again and again."""

    network: Any
    module: Any

    def answer(
        self, arrays: Mapping[str, Array], *, wide: bool = False, fast: bool = False, rounded: int = 0
    ) -> Answer:
        """As the eager model answers; `wide`: in float64; `rounded`: that with each result rounded by the draws of this
        number; `fast`: with the fast path that torch takes in evaluation."""
        tensors = {n: torch.from_numpy(np.array(a, order="C")) for n, a in arrays.items()}
        if wide:
            tensors = {n: t.double() if t.dtype == torch.float32 else t for n, t in tensors.items()}
        given = self.module.as_called(tensors)
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(fast)
        seed = torch.random.get_rng_state()
        try:
            rounding = _Rounded(rounded) if rounded else nullcontext()
            with torch.no_grad(), _as_float64() if wide else nullcontext(), rounding:
                if isinstance(given, dict):
                    found = self.network(**given)
                else:
                    found = self.network(*given) if isinstance(given, tuple) else self.network(given)
            leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
            return [as_array(leaf) for leaf in leaves]
        except Exception as error:  # noqa: BLE001 - whatever the model raises: it does not answer
            return f"{type(error).__name__}: {error}"[:300]
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
            torch.random.set_rng_state(seed)

    def widened(self) -> Model | None:
        """This copy in float64; None where the model cannot be."""
        try:
            return Model(copy.deepcopy(self.network).double(), self.module)
        except Exception:  # noqa: BLE001 - quantized layers, generators: they have no float64
            return None

    def shaken(self, seed: int, scale: float) -> Model:
        """Its weights as they might as well have been rounded."""
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.network.parameters():
                if weight.is_floating_point():
                    sign = torch.randint(0, 2, weight.shape, generator=random) * 2 - 1
                    weight.mul_(1 + scale * ULP * sign)
        return self


HALVES = (torch.float16, torch.bfloat16)
SUMS = (torch.ops.aten.sum, torch.ops.aten.mean)
POSITIONS = ("aten.grid_sampler", "aten.affine_grid", "aten.upsample_linear", "aten.upsample_bi", "aten.upsample_tri")
"""Operators that compute positions between numbers, whose rounding is inside of them and grows with the size."""


class _Rounded(TorchDispatchMode):
    """Each operator's result in float64 becomes one of the two float32 numbers around it, at random.

    A float32 operator that is right to one unit in the last place returns one of the two, so each such run is an answer
    that the model might as well have given. Shaken inputs and weights do not show this: the positions of `grid_sample`
    are made of sizes, and `tanh(9)` is the same for inputs near 9. Results that float32 holds stay as they are. Sums
    are off by half a unit of what is added up: rounded terms make a whole number in one order and not in another.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = decomposition_table.get(func) if str(func).startswith(POSITIONS) else None
        if parts is not None:
            with self:
                return parts(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is None or schema.is_mutable or func.is_view:
            return found
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype in HALVES for leaf in pytree.tree_leaves(found)):
            return self._round_halves(func, args, kwargs or {}, found)
        if func.overloadpacket in SUMS and found.dtype == torch.float64:
            among = func(args[0].double().abs(), *args[1:], **(kwargs or {}))
            found = found + among * 2.0**-24 * (torch.rand(found.shape, generator=self.random) * 2 - 1)
        return pytree.tree_map(self._round, found)

    def _round_halves(self, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
        """A result of half precision is one of the two numbers around that of float64, in which a runtime may compute:
        it leaves casts to a half and back out."""
        wide = {name: torch.float64 if value in HALVES else value for name, value in kwargs.items()}
        try:
            exact = func(*pytree.tree_map(_widen_half, args), **pytree.tree_map(_widen_half, wide))
        except RuntimeError:  # no kernel for float64
            return found
        return pytree.tree_map(lambda half, one: self._round(one, half.dtype) if _is_half(half) else half, found, exact)

    def _round(self, value: Any, kind: torch.dtype = torch.float32) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64 or not value.numel():
            return value
        near = value.to(kind)
        other = torch.nextafter(near, torch.where(near.double() < value, math.inf, -math.inf).to(kind))
        other = torch.where((near.double() == value) | ~near.isfinite() | ~other.isfinite(), near, other)
        choice = torch.rand(value.shape, generator=self.random, dtype=torch.float32) < 0.5
        rounded = torch.where(choice, near, other)
        return rounded.double() if kind == torch.float32 else rounded


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALVES


def _widen_half(value: Any) -> Any:
    return value.double() if _is_half(value) else value


class _as_float64:
    """What a model makes of Python numbers is float64 too, and so is what it makes of whole numbers by `float()`."""

    def __enter__(self) -> None:
        self.before, self.float = torch.get_default_dtype(), torch.Tensor.float
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
        torch.Tensor.float = self.float  # type: ignore[method-assign]


def as_array(leaf: torch.Tensor) -> Array:
    leaf = leaf.detach().resolve_conj().resolve_neg()
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy().copy()


def shake(arrays: Mapping[str, Array], seed: int, scale: float) -> dict[str, Array]:
    """Inputs as they might as well have been rounded."""
    random = np.random.default_rng(seed)
    return {
        name: (array * (1 + scale * ULP * random.choice((-1, 1), array.shape))).astype(array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in arrays.items()
    }


FAMILIES = ("usual", "usual", "usual", "large", "small", "positive", "negative", "zero", "equal", "one large")


def draw(field: str, shape: Sequence[int], sizes: Mapping[str, int], random: np.random.Generator, how: str) -> Array:
    """Finite values of one input, of the family `how`."""
    kind, _, below = field.split()[0].partition(":")
    if kind == "mask":
        return _mask(shape, random, how)
    if kind == "int":
        wide = {"large": 2**40, "small": 2}.get(how, 20)
        values = random.integers(-wide, wide, tuple(shape), dtype=np.int64)
        return np.zeros_like(values) if how == "zero" else np.abs(values) if how == "positive" else values
    if kind != "real":
        least = 1 if kind == "lengths" else 0
        top = (sizes[below] if kind == "lengths" else int(below) - 1) + 1
        values = random.integers(least, max(top, least + 1), tuple(shape))
        if how == "large":
            values[...] = top - 1
        if how == "zero":
            values[...] = least
        if kind == "lengths" and values.size:
            values[0] = top - 1
        return np.asarray(values, dtype=np.int64)
    values = random.standard_normal(tuple(shape))
    if how in ("large", "small"):
        values *= 30 if how == "large" else 1e-3
    if how in ("positive", "negative"):
        values = np.abs(values) * (1 if how == "positive" else -1)
    if how == "zero":
        values[...] = 0
    if how == "equal" and values.size:
        values[...] = values[:1]
    if how == "one large" and values.size:
        values[random.integers(shape[0])] *= 1000
    return values.astype(np.float32)


def _mask(shape: Sequence[int], random: np.random.Generator, how: str) -> Array:
    """Rows that begin with what counts, at least one value; now and then with holes."""
    shown = random.integers(1, max(shape[1], 1) + 1, (shape[0], 1))
    mask = np.arange(shape[1])[None] < shown
    if how == "positive":
        mask[...] = True
    if how == "negative":
        mask = random.random(tuple(shape)) < 0.6
        mask[:, :1] = True
    return np.asarray(mask, dtype=np.bool_)
