"""One architecture of the zoo: how it is built, its inputs, and which dimensions are free.

Inputs are declared as fields, from which both the example and the fresh inputs are made (`bench.zoo.fresh`). A name
with dots is a place in a nested dict: `batch.flag`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.generic]
Kind = Literal["real", "unit", "ids", "lengths", "mask", "flag", "edges"]
"""`unit` lies in [0, 1); `lengths` are from 1 to the size of a symbol; a `mask` is 1 for what counts, at least one in
each row; `edges` is a dense adjacency of 0 and 1 with its diagonal set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One input. A str in `shape` is a free dimension."""

    kind: Kind
    shape: tuple[int | str, ...]
    below: int | str = 0
    """Ids lie below it; of `lengths`, the symbol that they measure."""
    like: Literal["float32", "float64", "float16", "int64", "int8", "uint8", "bool"] = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model with random weights."""

    name: str
    group: str
    build: Callable[[], torch.nn.Module]
    fields: Mapping[str, Field]
    sizes: Mapping[str, int]
    """Size of each free dimension in the example."""
    keywords: bool = False
    """Whether `forward` is called with names."""

    def module(self) -> torch.nn.Module:
        """The model in evaluation mode; equal at every call."""
        torch.manual_seed(0)
        return self.build().eval()

    def arguments(self, arrays: Mapping[str, Array]) -> Any:
        """`arrays` as the user passes them to capture: a dict of keyword arguments, or a tuple."""
        nested: dict[str, Any] = {}
        for name, array in arrays.items():
            *outer, last = name.split(".")
            inside = nested
            for step in outer:
                inside = inside.setdefault(step, {})
            inside[last] = torch.from_numpy(np.array(array, order="C"))
        if self.keywords:
            return nested
        return next(iter(nested.values())) if len(nested) == 1 else tuple(nested.values())

    @property
    def dynamic_shapes(self) -> dict[str, dict[int, str]]:
        """The free dimensions beside the batch, as a recipe declares them."""
        found = {
            name: {
                axis: size for axis, size in enumerate(one.shape) if isinstance(size, str) and (axis or size != "batch")
            }
            for name, one in self.fields.items()
        }
        return {name: axes for name, axes in found.items() if axes}


def real(*shape: int | str) -> Field:
    return Field(kind="real", shape=shape)


def unit(*shape: int | str) -> Field:
    return Field(kind="unit", shape=shape)


def ids(below: int, *shape: int | str) -> Field:
    return Field(kind="ids", shape=shape, below=below, like="int64")


def lengths(of: str, *shape: int | str) -> Field:
    return Field(kind="lengths", shape=shape, below=of, like="int64")


def mask(*shape: int | str, like: Literal["float32", "int64", "bool"] = "int64") -> Field:
    return Field(kind="mask", shape=shape, like=like)


def flag(*shape: int | str) -> Field:
    return Field(kind="flag", shape=shape, like="bool")


def edges(*shape: int | str) -> Field:
    return Field(kind="edges", shape=shape)


@dataclass(slots=True)
class Shelf:
    """A list of architectures that grows by one call for each."""

    group: str
    sizes: Mapping[str, int]
    found: list[Architecture] = field(default_factory=list)

    def add(
        self,
        name: str,
        build: Callable[[], torch.nn.Module],
        fields: Mapping[str, Field],
        *,
        keywords: bool = False,
        **sizes: int,
    ) -> None:
        """Adds one; `sizes` are those that differ from the shelf's."""
        symbols = {size for one in fields.values() for size in one.shape if isinstance(size, str)}
        chosen = {**self.sizes, **sizes}
        self.found.append(
            Architecture(
                name=name,
                group=self.group,
                build=build,
                fields=fields,
                sizes={symbol: chosen[symbol] for symbol in sorted(symbols)},
                keywords=keywords,
            )
        )
