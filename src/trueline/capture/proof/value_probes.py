"""Probes of the values that a model may meet and its examples do not show: NaN, infinities, and the ends of a dtype.

Each changes one input, so that a disagreement names the condition that leaves it out (`capture/value_claims.py`). Where
NaN lies matters: ONNX Runtime's extremes find one in the first place and lose it in the last, and what one record does
to others shows only beside them. Whole numbers are planted at the ends of their range and where casts to FP32,
FP64 and INT32 lose them.

Two answers of NaN agree, so huge values alone prove nothing of a runtime that computes in double what torch computes in
single precision: at 1e19 it answers a number, and the model NaN. Smaller values are tried until the model answers with
numbers; of a model whose calls cost little, values between the two as well, by halving.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from trueline.bundle.signature import Array, Signature, TensorSpec
from trueline.bundle.values import Values
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import BATCH, Probe, fit, is_mask, resize

RECORDS, FEWER = 12, 4
"""Records of a probe that has another value in each, and of a model whose calls take long: one of each kind, or two
places where there is one kind."""
BORDERS = (2**15, 2**24 + 1, 2**31 - 1, 2**31, 2**53 + 1, -(2**31), -(2**31) - 1, -(2**53) - 1)
"""Whole numbers beyond which a cast loses something."""
FEW = 2
"""Records of a probe of whole numbers: many are tried, one by one."""
HUGE = (1e308, 3e38, 1e30, 1e19, 1e18, 1e9, 1e6, 6e4, 1e4, 1e3, 1e2, 1e1)
"""Magnitudes of floats, the largest first: a smaller one is only of use where a larger one is refused, wrong, or no
number on either side. 6e4, 3e38 and 1e308 are near the ends of FP16, FP32 and FP64, where sums overflow in one order of
their terms alone; the square of 1e19 is near that of FP32."""

UP_TO, EQUAL = "up to {:g}", ("all the lowest", "all the largest")
HALVES = 6
"""From a factor of 1e11, the widest step of the sizes, to one of 1.5."""
Observe = Callable[[Sequence[Probe]], tuple[Observation, ...]]
_KINDS = {"NaN": (np.nan,), "infinities": (np.inf, -np.inf), "either": (np.nan, np.inf, -np.inf)}


def make_value_probes(
    example: Mapping[str, Array], signature: Signature, *, seed: int = 0, dear: bool = False
) -> tuple[Probe, ...]:
    """Probes from `example`, each inside the ranges of `signature`'s inputs but for NaN and infinities; of FEWER
    records for a model whose calls are `dear`."""
    random = np.random.default_rng(seed)
    probes: list[Probe] = []
    for spec in signature.inputs:
        if not example[spec.name].size:
            continue
        if example[spec.name].dtype.kind == "f":
            sizes = (1, FEW, FEWER) if dear else (0, RECORDS, RECORDS)
            batches = [many(example, signature, size) if size else example for size in sizes]
            probes += _floats(batches, signature, spec, random)
        elif example[spec.name].dtype.kind in "iu":
            probes += _integers(example, signature, spec)
    return tuple(probes)


def plant(array: Array, value: float | int) -> Array:
    """`array` with `value` in its first and last place."""
    planted = array.copy()
    planted.reshape(-1)[[0, -1]] = np.asarray(value, array.dtype)
    return planted


def many(example: Mapping[str, Array], signature: Signature, count: int) -> dict[str, Array]:
    """`example` at `count` records where the signature allows it, else as it is."""
    base = signature.sizes(example)
    sizes = fit(signature, base, {BATCH: count}) if BATCH in base else None
    return resize(example, signature, sizes or base)


def _probe(
    example: Mapping[str, Array], signature: Signature, what: str, name: str, array: Array, value: float | int
) -> Probe:
    inputs = {**example, name: array}
    sizes = signature.sizes(inputs)
    named = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
    return Probe(
        name=f"{named}, {name}: {what}" if named else f"{name}: {what}", origin="made",
        num_records=sizes.get(BATCH, len(array) if array.ndim else 1), inputs=inputs, wild=True, planted=name,
        value=value,
    )  # fmt: skip


def _floats(
    batches: Sequence[Mapping[str, Array]], signature: Signature, spec: TensorSpec, random: np.random.Generator
) -> Iterator[Probe]:
    """`batches`: the example, the records that have a value of one kind each, and those that have several."""
    (example, some, wide), name = batches, spec.name
    array = example[name]

    def place(at: int, value: float) -> Array:
        changed = array.copy()
        changed.reshape(-1)[at] = value
        return changed

    for what, changed in (
        ("one NaN", place(0, np.nan)),
        ("NaN in the last place", place(-1, np.nan)),
        ("one infinity", place(0, np.inf)),
        ("minus infinity in the last place", place(-1, -np.inf)),
    ):
        yield _probe(example, signature, what, name, changed, np.nan)
    if array.ndim:
        nan = np.array([np.nan])
        for what, values in (
            ("NaN", nan),
            ("infinities", np.array([np.inf, -np.inf])),
            ("either", np.array([np.nan, np.inf, -np.inf])),
        ):
            records = wide if what == "either" else some
            changed = _scatter(records[name], values, random, whole=what == "either")
            yield _probe(records, signature, f"{what} in some records", name, changed, np.nan)
    shown = float(np.max(np.abs(np.where(np.isfinite(array), array, 0)), initial=0.0))
    kind: Any = array.dtype
    size = next((size for size in HUGE if size < float(np.finfo(kind).max)), 0.0)
    if 0 < shown < size:
        with np.errstate(all="ignore"):  # of an example with infinities
            scaled = np.asarray(array.astype(np.float64) * (size / shown)).astype(array.dtype)
        yield _probe(example, signature, UP_TO.format(size), name, scaled, size)
        yield _probe(example, signature, f"magnitudes {UP_TO.format(size)}", name, np.abs(scaled), size)
        # products of both signs: where a sum of them is NaN, an extreme may lose it, and its order decides if it is
        most = float(np.finfo(kind).max)
        for what, value in zip(EQUAL, (-most, most), strict=True):
            equal = np.full_like(array, value)
            yield _probe(example, signature, f"{what}, {UP_TO.format(most)}", name, equal, most)


def smaller(probe: Probe) -> Iterator[Probe]:
    """A probe of huge numbers with smaller ones, for a program that answers it otherwise than the model."""
    most = probe.value
    if not probe.planted or not isinstance(most, float) or np.isnan(most):
        return
    for size in (size for size in HUGE if size < most):
        yield at_size(probe, size)


def at_size(probe: Probe, size: float) -> Probe:
    """The probe of huge numbers `probe` with numbers up to `size`."""
    most, name = float(probe.value), probe.planted
    scaled = np.asarray(probe.inputs[name].astype(np.float64) * (size / most)).astype(probe.inputs[name].dtype)
    named = probe.name.replace(UP_TO.format(most), UP_TO.format(size))
    return replace(probe, name=named, inputs={**probe.inputs, name: scaled}, value=size)


def _scatter(array: Array, values: Array, random: np.random.Generator, *, whole: bool) -> Array:
    """One of `values` at another place of each record but every fourth; with `whole`, a record of them alone, one that
    is half of them, and the same place in all others."""
    changed = array.copy()
    rows = changed.reshape(len(changed), -1)
    width = rows.shape[1]
    for at, row in enumerate(rows):
        if at % 4 == 3 or not width:
            continue
        if whole and at % 4 == 0:
            row[:] = values[at // 4 % len(values)]
        elif whole and at % 4 == 1:
            row[random.random(width) < 0.5] = values[0]
        else:
            row[random.integers(width) if not whole else width // 2] = values[at % len(values)]
    return changed


def _integers(example: Mapping[str, Array], signature: Signature, spec: TensorSpec) -> Iterator[Probe]:
    """At two records; of a mask only what lies beside 0 and 1, and its ends."""
    name, mask = spec.name, is_mask(example[spec.name])
    few = many(example, signature, FEW)
    sizes = signature.sizes(few)
    for value in borders(few[name], spec.values, sizes, shown=example[name], beyond=() if mask else BORDERS):
        yield _probe(few, signature, f"{value}", name, plant(few[name], value), value)
    for value in ends(few[name], spec.values, sizes):
        yield _probe(few, signature, f"{value} everywhere", name, np.full_like(few[name], value), value)


def ends(array: Array, values: Values, sizes: Mapping[str, int]) -> tuple[int, int]:
    """The least and the largest whole number of the dtype that `values` accepts."""
    kind: Any = array.dtype
    low, high = values.bounds(sizes)
    least, most = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    return least if low is None else max(least, int(low)), most if high is None else min(most, int(high))


def borders(
    array: Array, values: Values, sizes: Mapping[str, int], *, shown: Array, beyond: Sequence[int] = BORDERS
) -> list[int]:
    """Whole numbers outside of what the example has `shown` and inside of `values`, the nearest to it first."""
    low, high = ends(array, values, sizes)
    least, most = int(shown.min()), int(shown.max())
    wanted = [least - 1, most + 1, -1, low, high, *beyond]
    kept = [one for one in dict.fromkeys(wanted) if low <= one <= high and not least <= one <= most]
    return sorted(kept, key=lambda one: one - most if one > most else least - one)


def observe_border(observe: Observe, observations: Sequence[Observation], *, cheap: bool) -> tuple[Observation, ...]:
    """Answers to smaller values than those of `observations` that the model answers with no number."""
    more: list[Observation] = []
    borders: list[tuple[Probe, float]] = []
    beyond = [seen for seen in observations if not _has_numbers(seen)]
    while probes := [probe for seen in beyond for probe in islice(smaller(seen.probe), 1)]:
        found = observe(probes)
        sizes = {seen.probe.name: seen.probe.value for seen in found if _has_numbers(seen)}
        parents = [(seen.probe, one) for seen in beyond for one in islice(smaller(seen.probe), 1)]
        ended = [(parent, float(one.value)) for parent, one in parents if one.name in sizes]
        borders += [
            one for one in ended if not any(what in one[0].name for what in EQUAL)
        ]  # the others are between the same sizes
        beyond = [seen for seen in found if not _has_numbers(seen)]
        more += found
    for _ in range(HALVES if cheap and borders else 0):
        found = observe([at_size(probe, (float(probe.value) * low) ** 0.5) for probe, low in borders])
        borders = [
            (probe, float(seen.probe.value)) if _has_numbers(seen) else (seen.probe, low)
            for (probe, low), seen in zip(borders, found, strict=True)
        ]
        more += found
    return tuple(more)


def _has_numbers(seen: Observation) -> bool:
    """Whether all floats of its answer are finite."""
    arrays = (seen.outputs or {}).values()
    return all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")
