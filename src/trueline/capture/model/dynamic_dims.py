"""Which dimensions are free: the batch always, another where the examples differ in it or where it is declared.

Declarations use torch's terms: `{"ids": {1: "length"}}`, or a `torch.export.Dim` with a range in place of the name.
Dimensions that are declared under one name are one symbol; others are one where torch.export finds them equal. A symbol
is called `batch`, by its declared name, `length` when it is the only further one and in the second dimension, else
`<input>.<axis>`.

The batch is the first dimension of an input, as a rule. A recurrent state comes as [layers, batch, width], a model that
takes the steps first wants [length, batch, width], and a scale or a table counts no records. Where sizes leave it
open, a declared name `batch` decides; what they suggest is taken when the model accepts one record more.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trueline.bundle.signature import Dim, TensorSpec
from trueline.errors import CaptureError, closest, join_names

BATCH = "batch"
"""The symbol of the dimension that counts records."""

Place = tuple[str, int]
"""Name of an input, and an axis."""
Leads = dict[str, int | None]
"""Name of an input -> its dimension that counts the records; None where none does."""
Declared = tuple[dict[Place, str], dict[str, Dim]]
"""The recipe's declarations: names by place, and ranges by name."""
Batches = Sequence[Sequence[torch.Tensor]]


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

    def name_groups(self, groups: Sequence[Sequence[Place]]) -> list[str]:
        """A name for each group of dimensions that are one symbol."""
        others = [group for group in groups if not self._counts_records(group) and group[0] not in self.grows]
        second = [group for group in others if any(axis == 1 for _, axis in group)]
        names: list[str] = []
        for group in groups:
            declared = [self.declared[place] for place in group if place in self.declared]
            alone = len(others) == 1 and second and group is others[0]
            plain = "length" if alone else f"{group[0][0]}.{group[0][1]}"
            name = BATCH if self._counts_records(group) else declared[0] if declared else plain
            names.append(name if name not in names or name == BATCH else f"{group[0][0]}.{group[0][1]}")
        return names

    def group(self, same: Mapping[Place, Any]) -> list[list[Place]]:
        """The places by their value in `same` and by declared name: each group is one symbol."""
        groups: list[list[Place]] = []
        for place in self.places:
            for group in groups:
                if any(self._is_one(place, other, same) for other in group):
                    group.append(place)
                    break
            else:
                groups.append([place])
        return groups

    def _is_one(self, a: Place, b: Place, same: Mapping[Place, Any]) -> bool:
        records = self._counts_records([a]) and self._counts_records([b])
        name = self.declared.get(a)
        return records or same[a] == same[b] or (name is not None and name == self.declared.get(b))

    def _counts_records(self, group: Sequence[Place]) -> bool:
        return any(place in self.leads for place in group)


def find_free(
    specs: Sequence[TensorSpec],
    examples: Batches,
    declared: Declared,
    *,
    leads: Leads,
    follows: Collection[Place] = (),
    grows: Mapping[Place, int] | None = None,
) -> Free:
    """The free dimensions of inputs `specs`, from `examples`. A state is free where it `follows` the batch, where it
    `grows` and where it is declared; if its first dimension is free and does not grow, that counts records too."""
    names, bounds = declared
    grows = dict(grows or {})
    places: list[Place] = []
    counting: set[Place] = set()
    for i, spec in enumerate(specs):
        for axis in range(len(spec.shape)):
            varies = len({example[i].shape[axis] for example in examples}) > 1
            place = (spec.name, axis)
            if leads.get(spec.name) == axis or (spec.role == "state" and not axis and place not in grows):
                counting.add(place)
            data = spec.role == "data" and place in counting
            if data or varies or place in names or place in follows or place in grows:
                places.append(place)
    return Free(places=tuple(places), leads=frozenset(counting), declared=names, bounds=bounds, grows=grows)


def read_declared(specs: Sequence[TensorSpec], declared: Mapping[str, Any]) -> Declared:
    """`declared` for the inputs `specs`. Raises CaptureError for a declaration that names no dimension."""
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
        for axis, declaration in axes.items():
            rank = ranks[input_name]
            if not isinstance(axis, int) or not -rank <= axis < rank:
                raise CaptureError(f"dynamic_shapes declares axis {axis!r} of '{input_name}', which has {rank} axes")
            name, bound = _name_of(declaration, input_name, axis % rank)
            names[input_name, axis % rank] = name
            if bound is not None:
                bounds[name] = bound
    return names, bounds


def _name_of(declaration: Any, input_name: str, axis: int) -> tuple[str, Dim | None]:
    """The name, and the range if it came as a torch.export.Dim with one."""
    if declaration is None or str(declaration).startswith("_DimHint"):
        return (BATCH if axis == 0 else f"{input_name}.{axis}"), None
    if isinstance(declaration, str) and declaration:
        return declaration, None
    name, low, high = (getattr(declaration, key, None) for key in ("__name__", "min", "max"))
    if not isinstance(name, str):
        raise CaptureError(
            f"dynamic_shapes declares axis {axis} of '{input_name}' as {declaration!r}; expected a name such as "
            "'length', or torch.export.Dim('length', min=1, max=512)"
        )
    upper = int(high) if isinstance(high, int) and high < 2**31 else None
    lower = int(low) if isinstance(low, int) and low > 1 else 1
    return name, Dim(min=lower, max=upper)


def resize_tensor(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """`tensor` with other sizes by axis: cut, or repeated from the beginning."""
    for axis, size in sizes.items():
        if tensor.shape[axis] != size:
            tensor = tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
    return tensor


def find_batch_axes(
    specs: Sequence[TensorSpec],
    batches: Batches,
    declared: Mapping[Place, str],
    accepts: Callable[[Sequence[torch.Tensor]], bool],
) -> tuple[Leads, list[int]]:
    """The dimension of each input that counts records, and how many records each of `batches` holds.

    `accepts`: whether the model can be called with such tensors in place of the first example's. Raises CaptureError
    for inputs that agree on no number of records, or leave open which dimension it is.
    """
    data = [at for at, spec in enumerate(specs) if spec.role == "data"]
    if not data:
        raise CaptureError("the example holds no tensor; give the model at least one")
    named = {name: axis for (name, axis), symbol in declared.items() if symbol == BATCH}
    first = _first_counting(specs, batches, data, named)
    if first is None:
        raise _no_common_batch(specs, batches[0])
    counts = [batch[first].shape[named.get(specs[first].name, 0)] for batch in batches]
    sure: Leads = {}
    doubtful: Leads = {}
    for at in data:
        name = specs[at].name
        if name in named or _counts(batches, at, 0, counts):
            sure[name] = named.get(name, 0)
        else:
            doubtful[name] = _find_elsewhere(specs[at], batches, at, counts, declared)
    if min(counts) < 1:
        raise CaptureError("the example holds no record", hint="give a batch of a few records")
    if not all(_counts(batches, at, sure[specs[at].name] or 0, counts) for at in data if specs[at].name in sure):
        raise _no_common_batch(specs, batches[0])
    if not doubtful:
        return sure, counts
    guesses = [doubtful]  # as the sizes suggest, then with none of the doubtful inputs following the batch
    if any(axis is not None for axis in doubtful.values()):
        guesses.append(dict.fromkeys(doubtful))
    for guess in guesses:
        axes = [(sure | guess).get(spec.name) for spec in specs]
        larger = [{} if axis is None else {axis: counts[0] + 1} for axis in axes]
        if accepts([*map(resize_tensor, batches[0], larger)]):
            return sure | guess, counts
    several = {at: {0: rows * (counts[0] + 1)} for at in data if (rows := _rows_each(batches, at, counts))}
    if several:  # beams of each record lie in one dimension: its size is free, and a guard of the program ties it
        larger = [several.get(at, {0: counts[0] + 1} if spec.name in sure else {}) for at, spec in enumerate(specs)]
        if accepts([*map(resize_tensor, batches[0], larger)]):
            return sure | dict.fromkeys(doubtful), counts
    raise _no_common_batch(specs, batches[0], ", and the model does not take one record more")


def _first_counting(
    specs: Sequence[TensorSpec], batches: Batches, data: Sequence[int], named: Mapping[str, int]
) -> int | None:
    """The input that gives the number of records: one that is declared, or whose first dimension varies, or the first
    that has one."""
    led = [at for at in data if specs[at].shape]
    declared = [at for at in led if specs[at].name in named]
    varying = [at for at in led if len({batch[at].shape[0] for batch in batches}) > 1]
    if varying:  # `[batch * beams, words]` beside `[batch, beams]`
        least = min(varying, key=lambda at: batches[0][at].shape[0])
        counts = [batch[least].shape[0] for batch in batches]
        whole = all(_rows_each(batches, at, counts) or _counts(batches, at, 0, counts) for at in varying)
        varying = [least] if whole and min(counts) > 0 else varying
    return next(iter([*declared, *varying, *led]), None)


def _counts(batches: Batches, at: int, axis: int, counts: Sequence[int]) -> bool:
    tensors = [batch[at] for batch in batches]
    return all(one.ndim > axis and one.shape[axis] == count for one, count in zip(tensors, counts, strict=True))


def _rows_each(batches: Batches, at: int, counts: Sequence[int]) -> int:
    """How many rows input `at` has for each record, where that is more than one in all examples, of which the numbers
    of records differ; else 0."""
    each = {batch[at].shape[0] / count if batch[at].ndim else 0 for batch, count in zip(batches, counts, strict=True)}
    only = each.pop()
    return int(only) if not each and only > 1 and only == int(only) and len({*counts}) > 1 else 0


def _find_elsewhere(
    spec: TensorSpec, batches: Batches, at: int, counts: Sequence[int], declared: Mapping[Place, str]
) -> int | None:
    """The one further dimension that is as large as the batch in every example; None where none is."""
    axes = [
        axis
        for axis in range(1, len(spec.shape))
        if (spec.name, axis) not in declared and _counts(batches, at, axis, counts)
    ]
    if len(axes) > 1:
        raise CaptureError(
            f"input '{spec.name}' has the size of the batch ({counts[0]}) in dimensions {axes}: which counts the "
            "records is not clear",
            hint=f"declare it: dynamic_shapes() returns {{'{spec.name}': {{{axes[0]}: '{BATCH}'}}}}; or yield a second "
            "example of another batch size",
        )
    return axes[0] if axes else None


def _no_common_batch(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], more: str = "") -> CaptureError:
    listing = ", ".join(
        f"{spec.name}: {list(tensor.shape)}" for spec, tensor in zip(specs, tensors, strict=True) if spec.role == "data"
    )
    return CaptureError(
        f"the inputs agree on no number of records ({listing}){more}",
        hint="the first dimension of every input is the batch; where it is another, dynamic_shapes() declares it: "
        f"{{'h': {{1: '{BATCH}'}}}}",
    )
