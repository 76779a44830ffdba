"""Inputs beside the example on which the proof changes what a model keeps or reads outside.

An answer may hide what changes before it: a row of a table, the place of the largest number, the sign. Each of three
records may get the same row from a number and from its double; of many records one does not. And a branch that the
example does not take may read what no other line reads.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from trueline.bundle.signature import Array
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.state.influence import ask
from trueline.capture.proof.state.sources import read_outside
from trueline.capture.proof.surroundings.influence import reads_surroundings

ALIKE, WAYS = 6, 6
"""Inputs that take the way of the example, and ways beside it."""
SMALL = 4096
"""Elements of inputs that cost little, however few the example has."""


def reads_outside(eager: EagerSession) -> bool:
    """Whether a call on the example draws, or reads a clock, the environment, process, machine or thread."""
    before = torch.get_rng_state()
    question = ask(eager, eager.example)
    if question is None:
        return False
    if not torch.equal(before, torch.get_rng_state()):
        return True
    readings = read_outside(question)
    return bool(readings.lines or readings.variables) or reads_surroundings(question)


def choose_other_ways(observations: Sequence[Observation]) -> Iterator[Mapping[str, Array]]:
    """The first inputs of each way but that of the example, which is the first of `observations`. All have answers."""
    ways = [seen.way for seen in observations[:1]]
    for seen in observations[1:]:
        if len(ways) <= WAYS and not any(seen.way == way for way in ways):
            ways.append(seen.way)
            yield seen.probe.inputs


def choose_alike(observations: Sequence[Observation]) -> Iterator[Mapping[str, Array]]:
    """Inputs that take the way of the example, those with the most different answers first."""
    example = observations[0]
    most = 2 * max(example.probe.volume[1], SMALL)
    alike = [seen for seen in observations[1:] if seen.way == example.way and not seen.probe.wild]
    alike = [seen for seen in alike if seen.probe.volume[1] <= most]
    return (seen.probe.inputs for seen in sorted(alike, key=_count_values, reverse=True)[:ALIKE])


def _count_values(seen: Observation) -> int:
    """How many different numbers the answer has."""
    return sum(len(np.unique(array)) for array in (seen.outputs or {}).values())
