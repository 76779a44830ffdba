"""A program whose state is explicit, called in sequence: its answers are those of the model that keeps its state.

    the model     y1, y2, y3, … from one model that keeps its state, from its initial state
    the program   y1, s1 = p(x1, s0); y2, s2 = p(x2, s1); …

Two sequences alternate: a program that kept a state of its own would mix them. The longer one has more calls than any
dimension of the state has elements, so that a ring buffer wraps around. Single probes need not repeat these inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Array
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.explicit_state import GIVEN, Explicit
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import Probe, make_probes
from trueline.capture.proof.prove import Proof, judge
from trueline.errors import CaptureError
from trueline.recipe.eager_mode import as_trained
from trueline.runtime.session import Session
from trueline.runtime.tensors import to_arrays, to_tensors

Inputs = Mapping[str, Array]

LEAST, AT_MOST = 6, 24
"""Calls of the longer sequence."""
TURNS = 4
"""Calls of the other one."""
ALL_BUT = ("zeros", "random")
"""Values that are also probed by themselves, since the state gets them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a sequence: its inputs beside the state, and the model's answer with its state afterwards."""

    name: str
    inputs: Inputs
    outputs: Inputs


def prove_sequences(proof: Proof, program: Session, eager: EagerSession) -> Proof:
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
    """The answers of the model that keeps its state: a long sequence, and a short one."""
    return [_run(eager, module, f"sequence {at}", given) for at, given in enumerate(_plan(eager, module), 1)]


def num_calls(eager: EagerSession) -> int:
    """Number of calls that `prove_sequences` adds; 0 for a model without a state."""
    return sum(map(len, _plan(eager, eager.module))) if isinstance(eager.module, Explicit) else 0


def covering(eager: EagerSession) -> Callable[[Probe], bool]:
    """Whether the sequences cover a probe: they contain its inputs, with a state that calls made. Probes that also
    change the state are kept for the values `ALL_BUT`."""
    if not isinstance(eager.module, Explicit):
        return lambda probe: False
    planned = {_key(inputs) for sequence in _plan(eager, eager.module) for inputs in sequence}
    names = eager.signature.state
    initial = _key({name: eager.example[name] for name in names})

    def is_covered(probe: Probe) -> bool:
        if probe.wild or _key({n: a for n, a in probe.inputs.items() if n not in names}) not in planned:
            return False
        as_given = _key({name: probe.inputs[name] for name in names}) == initial
        return as_given or not probe.name.endswith(tuple(f", {what}" for what in ALL_BUT))

    return is_covered


def _key(inputs: Inputs) -> tuple[tuple[str, tuple[int, ...], bytes], ...]:
    return tuple((name, array.shape, array.tobytes()) for name, array in sorted(inputs.items()))


def _plan(eager: EagerSession, module: Explicit) -> tuple[list[Inputs], list[Inputs]]:
    """The inputs of the two sequences, call after call; one goes through them from the front, one from the back."""
    inputs = _inputs(eager)
    longest = max((size for value in module.initial.values() for size in value.shape), default=0)
    length = min(max(LEAST, longest + 2), AT_MOST)
    return [inputs[at % len(inputs)] for at in range(length)], [inputs[-1 - at % len(inputs)] for at in range(TURNS)]


def _inputs(eager: EagerSession) -> list[Inputs]:
    """Different inputs of the example's sizes, without the state and without values that would drown it."""
    base = eager.signature.sizes(eager.example)
    different: dict[object, Inputs] = {}
    for probe in make_probes(eager.example, signature=eager.calling.presumed):
        if not probe.wild and eager.signature.sizes(probe.inputs) == base and "times" not in probe.name:
            inputs = {name: array for name, array in probe.inputs.items() if name not in eager.signature.state}
            different[_key(inputs)] = inputs
    return list(different.values())


def _run(eager: EagerSession, module: Explicit, name: str, inputs: Sequence[Inputs]) -> list[Step]:
    """The model's answers, up to the call that it does not answer, if there is one."""
    steps = []
    state = eager.initial_state
    with module.living({name: torch.from_numpy(array) for name, array in state.items()}) as users:
        for i, given in enumerate(inputs, 1):
            args, kwargs = eager.calling.arguments(to_tensors(eager.signature, {**given, **state}))
            plain = {key: value for key, value in kwargs.items() if not key.startswith(GIVEN)}
            try:
                with torch.no_grad(), as_trained():
                    leaves = torch.utils._pytree.tree_leaves(users(*args, **plain))
            except Exception as error:
                if i > 1:
                    break  # the state is full: a cache of 64 positions has room for 12 calls with 5
                raise CaptureError(
                    f"the model does not answer its example from its initial state: {type(error).__name__}: {error}",
                    hint="the buffers of the model as it is captured are the state that a client begins with",
                ) from error
            answer = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            outputs = to_arrays(eager.signature, (*answer, *module.state().values()))
            steps.append(Step(name=f"{name}, call {i}", inputs=given, outputs=outputs))
    return steps


def _judge(program: Session, tracks: Sequence[Sequence[Step]], eager: EagerSession) -> Iterator[Evidence]:
    """Runs the program on the tracks in turns as long as they last; each track's state goes back in with its next
    call."""
    pairs = program.signature.state
    states = [eager.initial_state for _ in tracks]
    for steps in zip_longest(*tracks):
        for i, step in enumerate(steps):
            if step is None:
                continue
            inputs = {**step.inputs, **states[i]}
            num_records = len(next(iter(step.inputs.values())))
            probe = Probe(name=step.name, origin="given", num_records=num_records, inputs=inputs)
            seen = Observation(probe=probe, outputs=dict(step.outputs), error="", way=())
            (evidence,) = judge(program, [seen]).evidence
            yield evidence
            if evidence.verdict != "agrees":
                return
            answer = program.run(inputs)
            states[i] = {given: answer[left] for given, left in pairs.items()}
