"""A program whose state is explicit, asked call after call: its answers are those of the model that remembers.

    the model     y1, y2, y3, … from one model that keeps its state, from its beginning
    the program   y1, s1 = p(x1, s0); y2, s2 = p(x2, s1); …

First one sequence alone, longer than any dimension of the state (a ring that wraps around shows then), and then two
that take turns: a program that kept anything to itself would mix them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trueline.bundle.schema import Evidence
from trueline.runtime import prove
from trueline.runtime.calling import as_trained
from trueline.runtime.eager import EagerSession, to_arrays, to_tensors
from trueline.runtime.explicit import GIVEN, Explicit
from trueline.runtime.probes import Probe, make_probes
from trueline.runtime.prove import Observation, Proof
from trueline.runtime.session import Session

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

ALONE, AT_MOST = 6, 24
TURNS = 4
"""Calls of each of the two sequences that take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a sequence: what goes in beside the state, and what the model answers and remembers then."""

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def proven(proof: Proof, program: Session, eager: EagerSession, *, versions: Mapping[str, str] | None = None) -> Proof:
    """`proof`, and if it holds and the model has a state, also over sequences of calls."""
    if not proof.proven or not isinstance(eager.module, Explicit):
        return proof
    first, *two = sequences(eager, eager.module)
    evidence: list[Evidence] = []
    for tracks in ([first], two):
        evidence += _judge(program, tracks, eager, versions)
    wrong = next((one for one in evidence if one.verdict != "agrees"), None)
    return replace(
        proof,
        proven=wrong is None,
        reason=f"in {wrong.probe}: {wrong.reason}" if wrong else "",
        evidence=(*proof.evidence, *evidence),
        max_abs_error=max([proof.max_abs_error, *(one.max_abs_error or 0.0 for one in evidence)]),
    )


def sequences(eager: EagerSession, module: Explicit) -> list[list[Step]]:
    """What the model that remembers answers: one long sequence, and two that differ in every input."""
    inputs = _inputs(eager)
    longest = max((size for value in module.initial.values() for size in value.shape), default=0)
    length = min(max(ALONE, longest + 2), AT_MOST)
    turned = [*inputs[1:], inputs[0]]
    return [
        _asked(eager, module, f"sequence {name}", given, count)
        for name, given, count in (("1", inputs, length), ("2", turned, TURNS), ("3", inputs[::-1], TURNS))
    ]


def _inputs(eager: EagerSession) -> list[Mapping[str, Array]]:
    """Inputs of the example's sizes, without the state and without what would drown it."""
    base = eager.signature.sizes(eager.example)
    probes = make_probes(eager.example, signature=eager.calling.presumed)
    kept = [
        probe.inputs
        for probe in probes
        if not probe.wild and eager.signature.sizes(probe.inputs) == base and "times" not in probe.name
    ]
    return [{n: a for n, a in inputs.items() if n not in eager.signature.state} for inputs in kept]


def _asked(
    eager: EagerSession, module: Explicit, name: str, inputs: Sequence[Mapping[str, Array]], count: int
) -> list[Step]:
    steps = []
    state = eager.beginning
    with module.living({name: torch.from_numpy(array) for name, array in state.items()}) as users:
        for i in range(count):
            given = inputs[i % len(inputs)]
            args, kwargs = eager.calling.arguments(to_tensors(eager.signature, {**given, **state}))
            plain = {key: value for key, value in kwargs.items() if not key.startswith(GIVEN)}
            with torch.no_grad(), as_trained():
                found = [leaf for leaf in _leaves(users(*args, **plain)) if isinstance(leaf, torch.Tensor)]
            outputs = to_arrays(eager.signature, (*found, *module.state().values()))
            steps.append(Step(name=f"{name}, call {i + 1}", inputs=given, outputs=outputs))
    return steps


def _leaves(found: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(found)


def _judge(
    program: Session, tracks: Sequence[Sequence[Step]], eager: EagerSession, versions: Mapping[str, str] | None
) -> Iterator[Evidence]:
    """Asks the program, the tracks in turns; what it remembers of each goes back to it."""
    pairs = program.signature.state
    states = [eager.beginning for _ in tracks]
    for steps in zip(*tracks, strict=True):
        for i, step in enumerate(steps):
            inputs = {**step.inputs, **states[i]}
            probe = Probe(
                name=step.name, origin="given", num_records=len(next(iter(step.inputs.values()))), inputs=inputs
            )
            seen = Observation(probe=probe, outputs=dict(step.outputs), error="", way=())
            one = prove.judge(program, [seen], versions=versions).evidence[0]
            yield one
            if one.verdict != "agrees":
                return
            answer = program.run(inputs)
            states[i] = {given: answer[left] for given, left in pairs.items()}
