"""A program whose state is explicit, asked call after call: its answers are those of the model that remembers.

    the model     y1, y2, y3, … from one model that keeps its state, from its beginning
    the program   y1, s1 = p(x1, s0); y2, s2 = p(x2, s1); …

Two sequences take turns: a program that kept anything to itself would mix them. One of them then goes on alone, until
it is longer than any dimension of the state (a ring that wraps around shows then). What they ask need not be asked
once more by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from trueline.bundle.schema import Evidence
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.explicit_state import GIVEN, Explicit
from trueline.capture.model.signature import as_trained
from trueline.capture.proof import prove
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import Probe, make_probes
from trueline.capture.proof.prove import Proof
from trueline.runtime.session import Session
from trueline.runtime.tensors import to_arrays, to_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

LEAST, AT_MOST = 6, 24
"""Calls of the longer sequence."""
TURNS = 4
"""Calls of the other one."""
ALL_BUT = ("zeros", "random")
"""Values that are also asked by themselves, since the state gets them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a sequence: what goes in beside the state, and what the model answers and remembers then."""

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def proven(proof: Proof, program: Session, eager: EagerSession) -> Proof:
    """`proof`, and if it holds and the model has a state, also over sequences of calls."""
    if not proof.proven or not isinstance(eager.module, Explicit):
        return proof
    evidence = list(_judge(program, sequences(eager, eager.module), eager))
    wrong = next((one for one in evidence if one.verdict != "agrees"), None)
    return replace(
        proof,
        proven=wrong is None,
        reason=f"in {wrong.probe}: {wrong.reason}" if wrong else "",
        evidence=(*proof.evidence, *evidence),
        max_abs_error=max([proof.max_abs_error, *(one.max_abs_error or 0.0 for one in evidence)]),
    )


def sequences(eager: EagerSession, module: Explicit) -> list[list[Step]]:
    """What the model that remembers answers: a long sequence, and a short one."""
    return [_asked(eager, module, f"sequence {at}", given) for at, given in enumerate(_planned(eager, module), 1)]


def num_calls(eager: EagerSession) -> int:
    """How many calls `proven` adds; none for a model without a state."""
    return sum(map(len, _planned(eager, eager.module))) if isinstance(eager.module, Explicit) else 0


def covering(eager: EagerSession) -> Callable[[Probe], bool]:
    """Whether a probe adds nothing to the sequences: its inputs are asked there, with the state as it has become.

    Of what it does to the state as well, some is left to ask.
    """
    if not isinstance(eager.module, Explicit):
        return lambda probe: False
    asked = {_told(inputs) for track in _planned(eager, eager.module) for inputs in track}
    names = eager.signature.state
    begun = _told({name: eager.example[name] for name in names})

    def covered(probe: Probe) -> bool:
        if probe.wild or _told({n: a for n, a in probe.inputs.items() if n not in names}) not in asked:
            return False
        as_given = _told({name: probe.inputs[name] for name in names}) == begun
        return as_given or not probe.name.endswith(tuple(f", {what}" for what in ALL_BUT))

    return covered


def _told(inputs: Mapping[str, Array]) -> tuple[tuple[str, tuple[int, ...], bytes], ...]:
    return tuple((name, array.shape, array.tobytes()) for name, array in sorted(inputs.items()))


def _planned(eager: EagerSession, module: Explicit) -> tuple[list[Mapping[str, Array]], list[Mapping[str, Array]]]:
    """The inputs of the two sequences, call after call; one goes through them from the front, one from the back."""
    inputs = _inputs(eager)
    longest = max((size for value in module.initial.values() for size in value.shape), default=0)
    length = min(max(LEAST, longest + 2), AT_MOST)
    return [inputs[at % len(inputs)] for at in range(length)], [inputs[-1 - at % len(inputs)] for at in range(TURNS)]


def _inputs(eager: EagerSession) -> list[Mapping[str, Array]]:
    """Different inputs of the example's sizes, without the state and without what would drown it."""
    base = eager.signature.sizes(eager.example)
    probes = make_probes(eager.example, signature=eager.calling.presumed)
    kept = [
        probe.inputs
        for probe in probes
        if not probe.wild and eager.signature.sizes(probe.inputs) == base and "times" not in probe.name
    ]
    asked = [{n: a for n, a in inputs.items() if n not in eager.signature.state} for inputs in kept]
    return list({_told(inputs): inputs for inputs in asked}.values())


def _asked(eager: EagerSession, module: Explicit, name: str, inputs: Sequence[Mapping[str, Array]]) -> list[Step]:
    steps = []
    state = eager.beginning
    with module.living({name: torch.from_numpy(array) for name, array in state.items()}) as users:
        for i, given in enumerate(inputs):
            args, kwargs = eager.calling.arguments(to_tensors(eager.signature, {**given, **state}))
            plain = {key: value for key, value in kwargs.items() if not key.startswith(GIVEN)}
            with torch.no_grad(), as_trained():
                found = [leaf for leaf in _leaves(users(*args, **plain)) if isinstance(leaf, torch.Tensor)]
            outputs = to_arrays(eager.signature, (*found, *module.state().values()))
            steps.append(Step(name=f"{name}, call {i + 1}", inputs=given, outputs=outputs))
    return steps


def _leaves(found: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(found)


def _judge(program: Session, tracks: Sequence[Sequence[Step]], eager: EagerSession) -> Iterator[Evidence]:
    """Asks the program, the tracks in turns as long as they last; what it remembers of each goes back to it."""
    pairs = program.signature.state
    states = [eager.beginning for _ in tracks]
    for steps in zip_longest(*tracks):
        for i, step in enumerate(steps):
            if step is None:
                continue
            inputs = {**step.inputs, **states[i]}
            probe = Probe(
                name=step.name, origin="given", num_records=len(next(iter(step.inputs.values()))), inputs=inputs
            )
            seen = Observation(probe=probe, outputs=dict(step.outputs), error="", way=())
            one = prove.judge(program, [seen]).evidence[0]
            yield one
            if one.verdict != "agrees":
                return
            answer = program.run(inputs)
            states[i] = {given: answer[left] for given, left in pairs.items()}
