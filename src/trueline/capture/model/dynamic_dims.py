"""Which dimensions are free: the batch always, another where the examples differ in it or where it is declared.

Declared is meant in torch's terms: `{"ids": {1: "length"}}`, or a `torch.export.Dim` with a range in place of the
name. Dimensions that are declared under one name are one symbol; others are one where torch.export finds them
equal. A symbol is called `batch`, by its declared name, `length` when it is the only further one and in the second
dimension, else `<input>.<axis>`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trueline.bundle.signature import Dim, TensorSpec
from trueline.errors import CaptureError, closest, join_names

if TYPE_CHECKING:
    import torch

BATCH = "batch"
"""The symbol of the dimension that counts records: as a rule the first of every input."""

Place = tuple[str, int]
"""Name of an input, and an axis."""

Leads = dict[str, int | None]
"""Name of an input -> its dimension that counts the records; None where none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The free dimensions of a model's inputs."""

    places: tuple[Place, ...]
    """In the order of the inputs; those that count records are among them."""
    leads: frozenset[Place] = frozenset()
    """Those that count records."""
    declared: Mapping[Place, str] = field(default_factory=dict)
    bounds: Mapping[str, Dim] = field(default_factory=dict)
    """Of declared names that came with a range."""
    grows: Mapping[Place, int] = field(default_factory=dict)
    """Dimensions in which a state grows, and the size with which it begins; none of them counts records."""

    def named(self, groups: Sequence[Sequence[Place]]) -> list[str]:
        """A name for each group of dimensions that are one symbol."""
        others = [group for group in groups if not self._counts_records(group) and group[0] not in self.grows]
        second = [group for group in others if any(axis == 1 for _, axis in group)]
        names: list[str] = []
        for group in groups:
            said = [self.declared[place] for place in group if place in self.declared]
            alone = len(others) == 1 and second and group is others[0]
            plain = "length" if alone else f"{group[0][0]}.{group[0][1]}"
            name = BATCH if self._counts_records(group) else said[0] if said else plain
            names.append(name if name not in names or name == BATCH else f"{group[0][0]}.{group[0][1]}")
        return names

    def grouped(self, same: Mapping[Place, Any]) -> list[list[Place]]:
        """The places by what `same` says of them and by declared name: each group is one symbol."""
        groups: list[list[Place]] = []
        for place in self.places:
            for group in groups:
                if any(self._one(place, other, same) for other in group):
                    group.append(place)
                    break
            else:
                groups.append([place])
        return groups

    def _one(self, a: Place, b: Place, same: Mapping[Place, Any]) -> bool:
        records = self._counts_records([a]) and self._counts_records([b])
        name = self.declared.get(a)
        return records or same[a] == same[b] or (name is not None and name == self.declared.get(b))

    def _counts_records(self, group: Sequence[Place]) -> bool:
        return any(place in self.leads for place in group)


def find(
    specs: Sequence[TensorSpec],
    examples: Sequence[Sequence[torch.Tensor]],
    declared: Declared,
    *,
    leads: Leads,
    follows: Collection[Place] = (),
    grows: Mapping[Place, int] | None = None,
) -> Free:
    """The free dimensions of inputs `specs`, of which `examples` were seen. A state is free where it `follows` the
    batch, where it `grows` (from so many) and where it is declared; where it does in its first dimension, but does not
    grow there, that counts records too.
    """
    names, bounds = declared
    places: list[Place] = []
    counting: set[Place] = set()
    for i, spec in enumerate(specs):
        for axis in range(len(spec.shape)):
            varies = len({example[i].shape[axis] for example in examples}) > 1
            place = (spec.name, axis)
            if leads.get(spec.name) == axis or (spec.role == "state" and not axis and place not in (grows or {})):
                counting.add(place)
            data = spec.role == "data" and place in counting
            if data or varies or place in names or place in follows or place in (grows or {}):
                places.append(place)
    return Free(places=tuple(places), leads=frozenset(counting), declared=names, bounds=bounds, grows=dict(grows or {}))


Declared = tuple[dict[Place, str], dict[str, Dim]]
"""What the recipe declares of the inputs: names by place, and ranges by name."""


def read(specs: Sequence[TensorSpec], declared: Mapping[str, Any]) -> Declared:
    """What `declared` says of the inputs `specs`. Raises CaptureError for a declaration that names no dimension."""
    names: dict[Place, str] = {}
    bounds: dict[str, Dim] = {}
    ranks = {spec.name: len(spec.shape) for spec in specs}
    for input_name, axes in declared.items():
        if input_name not in ranks or not isinstance(axes, Mapping):
            near = closest(str(input_name), ranks)
            raise CaptureError(
                f"dynamic_shapes declares {input_name!r}: {axes!r}; expected {{input: {{axis: name}}}}, "
                f"and the inputs are: {join_names(ranks)}",
                hint=f"did you mean '{near}'?" if near else "",
            )
        for axis, said in axes.items():
            rank = ranks[input_name]
            if not isinstance(axis, int) or not -rank <= axis < rank:
                raise CaptureError(f"dynamic_shapes declares axis {axis!r} of '{input_name}', which has {rank} axes")
            name, bound = _name_of(said, input_name, axis % rank)
            names[input_name, axis % rank] = name
            if bound is not None:
                bounds[name] = bound
    return names, bounds


def _name_of(said: Any, input_name: str, axis: int) -> tuple[str, Dim | None]:
    """The name, and the range if it came as a torch.export.Dim with one."""
    if said is None or str(said).startswith("_DimHint"):
        return (BATCH if axis == 0 else f"{input_name}.{axis}"), None
    if isinstance(said, str) and said:
        return said, None
    name, low, high = (getattr(said, key, None) for key in ("__name__", "min", "max"))
    if not isinstance(name, str):
        raise CaptureError(
            f"dynamic_shapes declares axis {axis} of '{input_name}' as {said!r}; expected a name such as 'length', "
            "or torch.export.Dim('length', min=1, max=512)"
        )
    upper = int(high) if isinstance(high, int) and high < 2**31 else None
    lower = int(low) if isinstance(low, int) and low > 1 else 1
    return name, Dim(min=lower, max=upper)


def resized(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """`tensor` with other sizes by axis: cut, or started again from the beginning."""
    import torch

    for axis, size in sizes.items():
        if tensor.shape[axis] != size:
            tensor = tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
    return tensor
