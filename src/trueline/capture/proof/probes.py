"""Probes: inputs made to show a difference between a program and the model. Other sizes, other values, extremes, masks.

Made from the user's example alone, by a seeded generator: equal arguments give equal probes. Every free dimension is
varied, several at once (pairwise, not the product), at most `LIMIT` probes in all. Floats vary freely; integers and
booleans are ids, lengths and masks, and all but masks stay inside what the example shows. Source: the measurements in
docs/concepts/proof.md (probes of this kind caught 30 of 30 bad programs of a zoo of 76 models).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trueline.bundle.signature import DATATYPES, Array, Dim, Signature, TensorSpec

BATCH = "batch"
LIMIT = 30
OTHERS = 4
"""The user's examples that are compared beside the first."""
INTEGERS = ("smallest integers", "largest integers", "random integers")
LARGER: tuple[int, ...] = (17, 32, 8)
"""Batch sizes that are tried last, if there is room."""
MANY = 32
"""Enough records for a runtime to take equal scores in an order of its own; more than 16 are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One input to compare on. `given` rows are the user's records, at any size."""

    name: str
    origin: Literal["given", "made"]
    num_records: int
    inputs: Mapping[str, Array]
    wild: bool = False
    """NaN, infinities, masks that hide everything, numbers at the ends of a dtype."""
    planted: str = ""
    """The one input that got `value` in some places, where a condition on its values may leave the probe out."""
    value: float | int = 0
    """What was planted; NaN for NaN and infinities."""

    @property
    def volume(self) -> tuple[int, int]:
        """Records, and elements of all inputs."""
        return self.num_records, sum(array.size for array in self.inputs.values())


def make_probes(
    example: Mapping[str, Array],
    *,
    signature: Signature | None = None,
    sizes: Iterable[int] | Mapping[str, Iterable[int]] = (),
    seed: int = 0,
    limit: int = LIMIT,
    covered: Callable[[Probe], bool] = lambda probe: False,
    dear: bool = False,
    chooses: bool = True,
) -> tuple[Probe, ...]:
    """Probes from `example`, a batch by name; `sizes` (of the batch, or by symbol) are tried before the usual ones.

    `signature` names what is free; without it, the first dimension of every input. The example itself comes first and
    last: a model that then answers it differently has a hidden state. Probes that are `covered` elsewhere are left out.
    `dear`, of a model whose calls take long: fewer records. `chooses`: whether the model may take one of equal numbers.
    """
    maker = _Maker(example, signature or _batch_only(example), np.random.default_rng(seed))
    if dear:
        maker.spare_records(chooses)
    wanted = sizes if isinstance(sizes, Mapping) else {maker.batch: sizes}
    given, again = (maker.probe({}, what) for what in ("as given", "as given, again"))
    more = [probe for probe in maker.reorder() if not covered(probe)]
    valued = _distinct([*maker.change_values({}), *maker.alike(), *maker.change_masks(), *maker.small()])
    valued = [probe for probe in valued if not covered(probe)]
    last = [] if covered(again) else [again]
    room = limit - 1 - len(more) - len(valued) - len(last)
    sized = list(maker.resize({symbol: tuple(borders) for symbol, borders in wanted.items()}, max(room, 6)))
    probes = [given, *sized, *more, *valued]
    return (*probes[: limit - len(last)], *last)


def make_given_probes(
    example: Mapping[str, Array], examples: Iterable[Mapping[str, Array]], signature: Signature
) -> tuple[Probe, ...]:
    """The user's other `examples`, at most `OTHERS` of them; and `example` at twice its sizes with the largest lengths
    and indices that these allow: a maximum of lengths that a trace took for a constant shows at no smaller one."""
    first = [array.tobytes() for array in example.values()]
    others = [one for one in examples if [array.tobytes() for array in one.values()] != first]
    made = [_as_given(inputs, signature, "another example", "given") for inputs in others[:OTHERS]]
    base = signature.sizes(example)
    for name, (symbol, short) in _measures(example, signature).items():
        larger = fit(signature, base, {symbol: 2 * base[symbol]})
        if larger is not None:
            inputs = resize(example, signature, larger)
            full = np.where(inputs[name] == example[name].max(), larger[symbol] - short, inputs[name])
            inputs[name] = np.asarray(full, example[name].dtype)
            made.append(_as_given(inputs, signature, f"{name}: as large as {symbol}", "made"))
    return tuple(made)


def _as_given(inputs: Mapping[str, Array], signature: Signature, what: str, origin: Literal["given", "made"]) -> Probe:
    sizes = signature.sizes(inputs)
    named = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
    records = sizes[counting(sizes)] if sizes else 1
    return Probe(name=f"{named}, {what}", origin=origin, num_records=records, inputs=dict(inputs))


def _distinct(probes: Iterable[Probe]) -> list[Probe]:
    """Without probes that repeat the inputs of an earlier one."""
    distinct: dict[tuple[object, ...], Probe] = {}
    for probe in probes:
        distinct.setdefault(tuple((array.shape, array.tobytes()) for array in probe.inputs.values()), probe)
    return list(distinct.values())


def _batch_only(example: Mapping[str, Array]) -> Signature:
    specs = tuple(
        TensorSpec(name=name, datatype=DATATYPES[array.dtype], shape=(BATCH, *array.shape[1:]))
        for name, array in example.items()
    )
    return Signature(inputs=specs, outputs=(), dims={BATCH: Dim()})


def counting(sizes: Mapping[str, int]) -> str:
    """The symbol that counts the records: `batch`, and of a signature without one the first."""
    return BATCH if BATCH in sizes else next(iter(sizes))


def resize(example: Mapping[str, Array], signature: Signature, sizes: Mapping[str, int]) -> dict[str, Array]:
    """`example` with the `sizes` by symbol: cut, or started again from the beginning; other symbols as they are."""
    resized = dict(example)
    for spec in signature.inputs:
        for axis, symbol in enumerate(spec.shape):
            size = sizes.get(symbol) if isinstance(symbol, str) else None
            have = resized[spec.name].shape[axis]
            if size is not None and size != have:
                resized[spec.name] = np.take(resized[spec.name], np.arange(size) % have, axis=axis)
    for name, (symbol, short) in _measures(example, signature).items():
        if symbol in sizes:
            most = min(max(sizes[symbol] - short, 0), int(resized[name].max(initial=0)))
            resized[name] = np.asarray(np.minimum(resized[name], np.asarray(most, resized[name].dtype)))
    return resized


def _measures(example: Mapping[str, Array], signature: Signature) -> dict[str, tuple[str, int]]:
    """Whole numbers that may be lengths or indices: the symbol that bounds each, and how far below it they have to
    stay.

    A length is at most the size (0), an index is less (1): numbers that reach 0 and not the size count as indices. One
    number for each record may be either; others are only indices, into a dimension that they do not have themselves.
    """
    base = signature.sizes(example)
    batch = counting(base) if base else ""
    measures: dict[str, tuple[str, int]] = {}
    for spec in signature.inputs:
        numbers = example[spec.name]
        if spec.role == "state" or numbers.dtype.kind not in "iu" or not numbers.size:
            continue
        if numbers.min() < 0 or is_mask(numbers):
            continue
        for_each = spec.shape == (batch,)
        most = int(numbers.max())
        least = most if for_each else most + 1
        holding = [symbol for symbol, size in base.items() if symbol not in spec.shape and size >= least]
        if holding:
            nearest = min(holding, key=base.__getitem__)
            index = not for_each or (numbers.min() == 0 and base[nearest] > most)
            measures[spec.name] = (nearest, int(index))
    return measures


def fit(signature: Signature, base: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, int] | None:
    """`base` with the sizes `wanted`, and one other symbol changed if a guard needs it (`2 * length == x.1` at length 3
    makes x.1 6); None when none fits."""
    sizes = {**base, **wanted}
    if signature.allows(sizes):
        return sizes
    for guard in (guard for guard in signature.guards if not guard.holds(sizes)):
        for other in (symbol for symbol in guard.symbols if symbol not in wanted):
            scaled = [base[other] * sizes[one] // base[one] for one in guard.symbols if base[one]]
            for size in [near + step for near in scaled for step in (0, 1, -1)] + list(range(1, 65)):
                if size >= 0 and signature.allows({**sizes, other: size}):
                    return {**sizes, other: size}
    return None


Change = Callable[[Array], Array]


class _Maker:
    """Makes probes of one example. Names contain the sizes of all symbols, and the change of the values."""

    def __init__(self, example: Mapping[str, Array], signature: Signature, random: np.random.Generator) -> None:
        self.example = example
        self.signature = signature
        self.random = random
        self.base = signature.sizes(example)
        self.batch = counting(self.base)
        self.whole = [name for name, array in example.items() if array.dtype.kind != "f"]
        self.floats = [name for name in example if name not in self.whole]
        self.masks = [name for name in self.whole if is_mask(example[name])]
        self.larger, self.num_alike, self.alone = LARGER, MANY, dict[str, int]()
        self.axes = {spec.name: spec.shape.index(self.batch) for spec in signature.inputs if self.batch in spec.shape}
        """The dimension that counts the records, of each input that has one."""

    def spare_records(self, chooses: bool) -> None:
        """One record of plain changes, many equal ones only if something `chooses` among them; far sizes come apart."""
        self.num_alike = LARGER[0] if chooses else self.base[self.batch]
        self.larger = LARGER[-1:] if self.floats else LARGER[::2]
        smallest = {self.batch: max(self.signature.dims[self.batch].min, 1)}
        self.alone = fit(self.signature, self.base, smallest) or {}

    def probe(
        self,
        sizes: Mapping[str, int],
        what: str,
        *,
        change: Callable[[dict[str, Array]], Mapping[str, Array]] | None = None,
        made: bool = False,
        wild: bool = False,
    ) -> Probe:
        inputs = resize(self.example, self.signature, sizes)
        named = ", ".join(f"{symbol} {size}" for symbol, size in ({**self.base, **sizes}).items())
        return Probe(
            name=f"{named}, {what}",
            origin="made" if made else "given",
            num_records=sizes.get(self.batch, self.base[self.batch]),
            inputs=change(inputs) if change else inputs,
            wild=wild,
        )

    def reorder(self) -> Iterator[Probe]:
        """Single records, the last record first, and the other dimensions backwards."""
        axes = self.axes.items()

        def second(inputs: dict[str, Array]) -> dict[str, Array]:
            return inputs | {name: self.example[name].take([1], axis) for name, axis in axes}

        def reverse(inputs: dict[str, Array]) -> dict[str, Array]:
            return inputs | {name: np.flip(inputs[name], axis).copy() for name, axis in axes}

        def backwards(inputs: dict[str, Array]) -> dict[str, Array]:
            free = {
                spec.name: tuple(axis for axis, size in enumerate(spec.shape) if axis and isinstance(size, str))
                for spec in self.signature.inputs
            }
            return {name: np.array(np.flip(array, free[name])) for name, array in inputs.items()}

        if self.base[self.batch] > 1:
            yield self.probe({self.batch: 1}, "record 1", change=second)
            yield self.probe({}, "last record first", change=reverse)
        if len(self.base) > 1:
            yield self.probe({}, "backwards", change=backwards)

    def resize(self, borders: Mapping[str, Sequence[int]], room: int) -> Iterator[Probe]:
        """Other sizes, as given: `borders` first. Symbols change alone at their smallest, then together."""
        lists = {symbol: self._sizes(symbol, borders.get(symbol, ())) for symbol in self.base}
        seen = [tuple(self.base.values())]
        for wanted in _pairwise(lists):
            if len(seen) > room:
                return
            sizes = fit(self.signature, self.base, wanted) or self._outside(wanted)
            if tuple(sizes.values()) not in seen:
                seen.append(tuple(sizes.values()))
                yield self.probe(sizes, "as given")

    def _sizes(self, symbol: str, borders: Sequence[int]) -> list[int]:
        n, dim = self.base[symbol], self.signature.dims[symbol]
        step = dim.multiple_of
        usual = [step, n + step, 2 * step, 2 * n, 3 * step, n - step]
        last = [size for size in self.larger if symbol == self.batch]
        sizes = dict.fromkeys([*usual[:2], *borders, *usual[2:], *last])
        return [size for size in sizes if size >= min(dim.min, 1) and size != n]

    def _outside(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """The first size that is not allowed, alone: the probe then shows that the program refuses it."""
        for symbol, size in wanted.items():
            if not self.signature.dims[symbol].allows(size):
                return {**self.base, symbol: size}
        return {**self.base, **wanted}

    def change_values(self, sizes: Mapping[str, int], only: Collection[str] | None = None) -> Iterator[Probe]:
        for what, change in _changes(self.random).items() if self.floats else ():
            if only is None or what in only:
                here = sizes if sizes or "random" in what else self.alone
                yield self.probe(here, what, change=_on(self.floats, change), made=True)
        for what in INTEGERS if self.whole else ():
            if only is None or what in only:
                yield self.probe(sizes, what, change=self._integers(what), made=True)

    def alike(self) -> Iterator[Probe]:
        """Many records of equal values: each runtime decides which of equal scores a sort or a top-k takes first."""
        sizes = fit(self.signature, self.base, {self.batch: self.num_alike}) or self.base

        def three(array: Array) -> Array:
            return np.asarray(self.random.integers(-1, 2, array.shape)).astype(array.dtype)

        if self.floats:
            yield self.probe(sizes, "three values", change=_on(self.floats, three), made=True)

    def small(self) -> Iterator[Probe]:
        """Other values at the smallest sizes."""
        least = {symbol: self.signature.dims[symbol].min for symbol in self.base}
        sizes = fit(self.signature, self.base, least) or {**self.base, self.batch: 1}
        if sizes != self.base:
            yield from self.change_values(sizes, ("zeros", "random", "random integers"))

    def change_masks(self) -> Iterator[Probe]:
        for what, change in _MASKS.items() if self.masks else ():
            yield self.probe({}, what, change=_on(self.masks, change), made=True, wild=True)

    def _integers(self, what: str) -> Callable[[dict[str, Array]], dict[str, Array]]:
        """Other integers, inside the range that the example shows of the same input, or from 0 where they are the same
        for all records."""
        given = {name: self.example[name] for name in self.whole}
        shown = {name: one if name in self.axes else np.append(one, 0) for name, one in given.items()}
        random = self.random
        return lambda inputs: inputs | {name: _whole(inputs[name], one, what, random) for name, one in shown.items()}


def _on(names: Sequence[str], change: Change) -> Callable[[dict[str, Array]], dict[str, Array]]:
    return lambda inputs: {name: change(array) if name in names else array for name, array in inputs.items()}


def _show_one(array: Array) -> Array:
    """One 1 in each row, in every row at another place."""
    if not array.size:
        return array
    mask = np.zeros_like(array).reshape(-1, array.shape[-1] if array.ndim else 1)
    places = np.arange(len(mask))
    mask[places, (places + 1) % mask.shape[1]] = 1
    return mask.reshape(array.shape)


def _show_first(array: Array) -> Array:
    mask = np.zeros_like(array)
    mask[..., :1] = 1
    return mask


_MASKS: dict[str, Change] = {
    "masks all 0": np.zeros_like,
    "masks all 1": np.ones_like,
    "masks show one": _show_one,
    "masks show the first": _show_first,
}
"""Each at the border of a claim on masks; see `capture.claims`."""


def is_mask(array: Array) -> bool:
    """Whether `array` may be a mask: booleans, or rows of integers that are 0 or 1."""
    rows = array.dtype.kind in "iu" and array.ndim > 1 and array.size > 0
    return (array.dtype.kind == "b" and array.ndim > 0) or (rows and set(np.unique(array)) <= {0, 1})


def _pairwise(lists: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Each symbol's first size alone, then all symbols together, each going through its list at its own offset."""
    if len(lists) > 1:
        yield from ({symbol: sizes[0]} for symbol, sizes in lists.items() if sizes)
    longest = max((len(sizes) for sizes in lists.values()), default=0)
    for i in range(longest):
        yield {one: sizes[(i + at) % len(sizes)] for at, (one, sizes) in enumerate(lists.items()) if sizes}


def _zeros(array: Array) -> Array:
    """Every second one is negative: equal to the others, and a border for signs, quotients and angles."""
    zeros = np.zeros_like(array)
    if array.dtype.kind == "f":
        zeros.reshape(-1)[1::2] = -0.0
    return zeros


def _changes(random: np.random.Generator) -> dict[str, Change]:
    def noise(array: Array) -> Array:
        spread = float(np.std(array.astype(np.float64))) if array.size else 0.0
        return np.asarray(random.standard_normal(array.shape) * (spread or 1.0)).astype(array.dtype)

    def sparse(array: Array) -> Array:
        """Numbers among zeros of either sign, as masking leaves them."""
        shown = noise(array) * np.asarray(10, array.dtype)
        return np.asarray(shown * random.integers(0, 2, array.shape).astype(array.dtype))

    return {
        "zeros": _zeros,
        "ones": np.ones_like,
        "negated": lambda array: np.asarray(array * np.asarray(-1, array.dtype)),
        "magnitudes": lambda array: np.asarray(np.abs(array)),
        "times 1000": lambda array: np.asarray(array * np.asarray(1000, array.dtype)),
        "times 0.001": lambda array: np.asarray(array * np.asarray(0.001, array.dtype)),
        "random": noise,
        "random, times 10, half of it zeros": sparse,
    }


def _whole(array: Array, shown: Array, what: str, random: np.random.Generator) -> Array:
    if not array.size or not shown.size:
        return array
    low, high = int(shown.min()), int(shown.max())
    if what != "random integers":
        return np.full_like(array, low if what == "smallest integers" else high)
    return np.asarray(random.integers(low, high, array.shape, endpoint=True)).astype(array.dtype)
