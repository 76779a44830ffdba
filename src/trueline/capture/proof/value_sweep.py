"""Probes of random values at many scales, for a model whose calls cost little.

A runtime's sigmoid may be exact but for its tail, and its rounding harmless but where a number lies between two whole
ones. What shows that is few records of large values, whose columns hold nothing but the tail, and many records of all
scales, of which some lie on an edge. Source: what `bench/attack` found among 2,200 models (docs/concepts/proof.md).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from trueline.bundle.signature import Array, Signature
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.probes import BATCH, Probe, fit, resize

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
CHEAP_S, DEAR_S, TRIES = 0.02, 0.2, 5
"""Seconds of this thread of a call on the example, the shortest of a few, above which no sweep is made, and above which
each record counts: two hundred of them are called once by the model and once by each program."""
FEW = ((1, 30.0), (2, 30.0), (2, 10.0), (3, 100.0), (2, 3.0))
"""Records, and the factor of their values."""
MANY = 256
SCALES = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 1000.0)
ROUNDED = "whole numbers of all scales"
"""Equal scores, of which each runtime takes another one first."""
ONE_SIGN = "of one sign"
"""What a recurrent layer sums over its steps then grows, and its gates close: its answers are their tails alone."""
CHANGES: Mapping[str, Callable[[Array], Array]] = {ROUNDED: np.rint, ONE_SIGN: np.abs}
ONE_SIDE = "far on one side"
"""Records whose values are all about one number: a sum over sigmoids holds nothing but their tails where each is in its
own, which values of both signs never reach together."""
SIDES = (-4.0, -6.0, -9.0, -12.0, -15.0, -17.0, -21.0, -30.0, 6.0, 12.0, 17.0, 30.0)
ABOUT = 0.02
MOST_VALUES = 1 << 20


def make_sweep(eager: EagerSession, signature: Signature, call_s: float, *, seed: int = 0) -> tuple[Probe, ...]:
    """Probes inside `signature`; none for a model that takes no floats or whose call takes longer than CHEAP_S:
    `call_s`, as `time_call` says."""
    floats = [name for name, array in eager.example.items() if array.dtype.kind == "f" and array.size]
    if not floats or BATCH not in signature.symbols:
        return ()
    if call_s > CHEAP_S:
        return ()
    random = np.random.default_rng([seed, len(floats)])
    return tuple(_sweep(eager.example, signature, floats, random))


def time_call(eager: EagerSession) -> float:
    """Seconds of this thread of a call on the example, the shortest of a few."""
    shortest = math.inf
    for tries in range(1, TRIES + 1):
        started = time.thread_time()
        eager.run(eager.example)
        shortest = min(shortest, time.thread_time() - started)
        if shortest <= CHEAP_S or (shortest > DEAR_S and tries > 1):
            break
    return shortest


def _sweep(
    example: Mapping[str, Array], signature: Signature, floats: list[str], random: np.random.Generator
) -> Iterator[Probe]:
    base = signature.sizes(example)
    spreads = {name: float(np.std(example[name].astype(np.float64))) or 1.0 for name in floats}
    axes = {spec.name: spec.shape.index(BATCH) for spec in signature.inputs if BATCH in spec.shape}
    mixed: Floats = random.choice(SCALES, MANY)
    one_large = np.where(np.arange(MANY // 4) == 5, 1000.0, 1.0)
    factors: list[tuple[str, Floats]] = [(f"times {factor:g}", np.full(count, factor)) for count, factor in FEW]
    factors += [("one large record", one_large), ("all scales", mixed), (ROUNDED, mixed)]
    factors += [(ONE_SIGN, np.full(1, 30.0)), (ONE_SIGN, np.full(1, 100.0)), ("tiny", np.full(2, 1e-30))]
    factors += [(ONE_SIDE, np.array(SIDES))]
    for what, scales in factors:
        sizes = fit(signature, base, {BATCH: len(scales)})
        if sizes is None or not signature.allows(sizes):
            continue
        if sum(array.size for array in example.values()) * len(scales) > MOST_VALUES * base[BATCH]:
            continue
        inputs = resize(example, signature, sizes)
        for name in floats:
            about = ABOUT if what == ONE_SIDE else None
            spread = spreads[name] if about is None else max(spreads[name], 1.0)
            drawn = _draw(inputs[name], spread, scales, axes.get(name), random, about=about)
            inputs[name] = np.asarray(CHANGES.get(what, np.asarray)(drawn))
        named = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
        yield Probe(name=f"{named}, sweep, {what}", origin="made", num_records=len(scales), inputs=inputs)


def _draw(
    array: Array,
    spread: float,
    scales: Floats,
    axis: int | None,
    random: np.random.Generator,
    *,
    about: float | None = None,
) -> Array:
    """Random values like those of `array`, record by record at another of the `scales`; with `about`, off from it by
    that part of it alone."""
    drawn = random.standard_normal(array.shape)
    drawn = (drawn if about is None else 1.0 + about * drawn) * spread
    if axis is not None:
        drawn = np.moveaxis(np.moveaxis(drawn, axis, -1) * scales, -1, axis)
    most = float(np.finfo(array.dtype.name).max) if array.dtype.kind == "f" else np.inf
    return np.asarray(np.clip(drawn, -most, most)).astype(array.dtype)
