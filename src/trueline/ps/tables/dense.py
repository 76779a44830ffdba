"""The dense parameters and buffers of one server: flat float32 parts, with the optimizer's slots beside them. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trueline.errors import TrainError
from trueline.ps.messages import DensePart, ModelSpec, OptimizerSpec
from trueline.ps.split import name_part
from trueline.ps.tables.optimizers import WIDE, Rows, slots_of, update


class DenseError(TrainError):
    """Dense gradients that cannot be applied. Nothing of the push is."""

    code = "gradient"


class _Part:
    """Elements [start, stop) of a parameter, as one row; `optimizer` is None for a buffer."""

    def __init__(self, part: DensePart, group: int, optimizer: OptimizerSpec | None) -> None:
        self.name, self.start, self.stop, self.group, self.optimizer = (
            part.name,
            part.start,
            part.stop,
            group,
            optimizer,
        )
        self.row: Rows = np.zeros((1, part.stop - part.start), np.float32)
        self.slots: list[Rows] = [
            np.full((1, self.row.shape[1] if width == WIDE else 1), value, np.float32)
            for _, width, value in (() if optimizer is None else slots_of(optimizer))
        ]

    def take(self, start: int, stop: int, row: Rows, slots: Sequence[Rows]) -> None:
        """Copies what another part of the same parameter has of this one; arrays are (1, n)."""
        low, high = max(self.start, start), min(self.stop, stop)
        if low >= high:
            return
        ours, theirs = slice(low - self.start, high - self.start), slice(low - start, high - start)
        self.row[:, ours] = row[:, theirs]
        for own, given in zip(self.slots, slots, strict=True):
            if own.shape[1] == self.row.shape[1] and given.shape[1] == row.shape[1]:
                own[:, ours] = given[:, theirs]
            else:
                own[...] = given  # a count


class DenseStore:
    """`parts`: those of this server, in the order in which pulls and pushes have them."""

    def __init__(self, spec: ModelSpec, parts: Sequence[DensePart]) -> None:
        self._groups = {one.name: one.group for one in spec.dense}
        self._spec = spec
        self._parts = [self._make(part) for part in parts]
        self.initialized = False
        self._kept: list[tuple[Mapping[str, Any], list[Rows]]] = []
        """What came for the next routing."""

    def _make(self, part: DensePart) -> _Part:
        group = self._groups[part.name]
        return _Part(part, group, self._spec.groups[group] if group >= 0 else None)

    def buffers(self) -> list[int]:
        """The places of buffers, whose pushed values count and not a step."""
        return [at for at, part in enumerate(self._parts) if part.optimizer is None]

    def initialize(self, dense: Mapping[str, Rows]) -> None:
        """Sets all parts by `split.name_part`. Raises DenseError when one is missing or has another size."""
        names = [name_part(DensePart(part.name, part.start, part.stop, 0)) for part in self._parts]
        for name, part in zip(names, self._parts, strict=True):
            if name not in dense or dense[name].size != part.row.size:
                raise DenseError(f"the initial value of {name} is missing, or not of {part.row.size} elements")
        for name, part in zip(names, self._parts, strict=True):
            part.row[0] = dense[name]
        self.initialized = True

    def values(self) -> list[Rows]:
        return [part.row[0] for part in self._parts]

    def check(self, given: Sequence[Rows]) -> None:
        """Raises DenseError for gradients, or values of buffers, that do not fit or are not finite."""
        if len(given) != len(self._parts):
            raise DenseError(f"{len(given)} dense gradients, expected {len(self._parts)}")
        for part, one in zip(self._parts, given, strict=True):
            if one.dtype != np.float32 or one.shape != (part.row.size,):
                raise DenseError(f"{part.name}: {one.dtype} {one.shape}, expected float32 {(part.row.size,)}")
            if not np.isfinite(one.sum(dtype=np.float64)) and not np.isfinite(one).all():
                bad = int((~np.isfinite(one)).sum())
                raise DenseError(
                    f"the gradient of {part.name} has {bad} elements that are NaN or Inf",
                    hint="a smaller learning rate or --clip-norm",
                )

    def apply(self, given: Sequence[Rows], rates: Sequence[float]) -> None:
        for part, one in zip(self._parts, given, strict=True):
            if part.optimizer is None:
                part.row[0] = one
            else:
                update(part.optimizer, part.row, one.reshape(1, -1).copy(), part.slots, rates[part.group])

    def dump(self) -> list[tuple[dict[str, Any], list[Rows]]]:
        """Of each part: what it is, and its value and slots."""
        return [
            (
                {"name": part.name, "start": part.start, "stop": part.stop, "arrays": 1 + len(part.slots)},
                [part.row, *part.slots],
            )
            for part in self._parts
        ]

    def load(self, facts: Mapping[str, Any], arrays: Sequence[Rows], *, keep: bool = False) -> None:
        """Takes what this server has of a part from `dump`; `keep`: and what it will have after the next `place`."""
        if keep:
            self._kept = [(other, of) for other, of in self._kept if other != facts]
            self._kept.append((facts, list(arrays)))
        for part in self._find(facts["name"]):
            part.take(facts["start"], facts["stop"], arrays[0], arrays[1:])

    def _find(self, name: str) -> Iterator[_Part]:
        return (part for part in self._parts if part.name == name)

    def place(self, parts: Sequence[DensePart]) -> None:
        """Other parts from now on; what was here before stays where it still is. `load` brings the rest."""
        before, self._parts = self._parts, [self._make(part) for part in parts]
        for old in before:
            for part in self._find(old.name):
                part.take(old.start, old.stop, old.row, old.slots)
        kept, self._kept = self._kept, []
        for facts, arrays in kept:
            for part in self._find(facts["name"]):
                part.take(facts["start"], facts["stop"], arrays[0], arrays[1:])
