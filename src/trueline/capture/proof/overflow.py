"""Probes around the size of values from which on the model answers no number.

Two answers of NaN agree, so huge values alone prove nothing of a runtime that computes in double what torch computes in
single precision: at 1e19 it answers a number, and the model NaN. Smaller values are tried until the model answers with
numbers; of a model whose calls cost little, values between the two as well, by halving.
"""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import Probe
from trueline.capture.proof.value_probes import at_size, smaller

HALVES = 6
"""From a factor of 1e11, the widest step of the sizes, to one of 1.5."""
Observe = Callable[[Sequence[Probe]], tuple[Observation, ...]]


def observe_border(observe: Observe, observations: Sequence[Observation], *, cheap: bool) -> tuple[Observation, ...]:
    """Answers to smaller values than those of `observations` that the model answers with no number."""
    more: list[Observation] = []
    borders: list[tuple[Probe, float]] = []
    beyond = [seen for seen in observations if not _has_numbers(seen)]
    while probes := [probe for seen in beyond for probe in islice(smaller(seen.probe), 1)]:
        found = observe(probes)
        sizes = {seen.probe.name: seen.probe.value for seen in found if _has_numbers(seen)}
        parents = [(seen.probe, one) for seen in beyond for one in islice(smaller(seen.probe), 1)]
        borders += [(parent, float(one.value)) for parent, one in parents if one.name in sizes]
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
