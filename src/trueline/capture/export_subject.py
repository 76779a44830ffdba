"""From a model to its exported program and the eager answers that every format is compared with."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch.nn.parameter import is_lazy

from trueline import events
from trueline.bundle.signature import Signature
from trueline.capture import claims, larger_trace, size_limits
from trueline.capture.export import operators, torch_export
from trueline.capture.export.exported import Exported
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.signature import BATCH
from trueline.capture.proof import stateful, value_ranges
from trueline.capture.proof.far_sizes import FarSizes
from trueline.capture.proof.frozen import UNFOLLOWED, find_unfollowed
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import LIMIT, Probe, fit, make_given_probes, make_probes, resize
from trueline.capture.proof.value_probes import make_value_probes, observe_border
from trueline.capture.proof.value_sweep import DEAR_S, make_sweep, time_call
from trueline.capture.subject import Subject
from trueline.capture.sum_limits import bound_exported, bound_sums, find_limits, tie_sizes
from trueline.capture.time_limit import EXPORT_SHARE, TimeLimit
from trueline.errors import CaptureError
from trueline.runtime import distribution

Answers = tuple[Observation, ...]
ALONE = 12
"""Fewest probes of single calls for a model with a long memory, beside its sequences."""


def export_and_observe(
    subject: Subject, far: FarSizes, limit: TimeLimit, *, random: bool
) -> tuple[Exported | CaptureError, Answers]:
    """The exported program with the widest claim that it bears out, and the eager model's answers. A model that draws
    random numbers gets fewer probes, each many times."""
    eager = subject.eager
    most, num_draws = (
        (distribution.PROBES, distribution.DRAWS) if random else (max(LIMIT - stateful.num_calls(eager), ALONE), 0)
    )
    events.emit("model.tracing")

    def observe(probes: Sequence[Probe]) -> Answers:
        events.emit("model.observed", probes=len(probes))
        return limit.run(f"the model on {len(probes)} probes", lambda: subject.observe(probes, num_draws=num_draws))

    def observe_all(signature: Signature, sizes: Mapping[str, Sequence[int]], chooses: bool = True) -> Answers:
        covered, call_s = stateful.covering(eager), 0.0 if random else time_call(eager)
        sweep, dear = () if random else make_sweep(eager, signature, call_s), call_s > DEAR_S
        probes = make_probes(
            eager.example, signature=signature, sizes=sizes, limit=most, covered=covered, dear=dear, chooses=chooses
        )
        given = () if random or eager.signature.state else make_given_probes(eager.example, eager.examples, signature)
        seen = observe([*probes, *given, *make_value_probes(eager.example, signature, dear=dear), *sweep])
        return (*seen, *observe_border(observe, seen, cheap=bool(sweep)))

    def settle(signature: Signature) -> Signature:
        return limit.run("the model at the ends of its values", lambda: value_ranges.settle(eager, signature))

    def limit_sums(signature: Signature) -> Signature:
        return limit.run("the model at sums of sizes", lambda: bound_sums(signature, find_limits(eager, signature)))

    try:
        exported = limit.run("torch.export", lambda: _export(subject, far), share=EXPORT_SHARE)
    except CaptureError as failed:
        presumed = settle(limit_sums(eager.calling.presumed))
        eager.calling = replace(eager.calling, presumed=presumed)
        return failed, observe_all(presumed, {})
    if size_limits.find_excluded(exported.signature, eager.calling):  # a script may take all, of which no trace tells
        eager.calling = replace(eager.calling, presumed=limit_sums(eager.calling.presumed))
    values = settle(exported.signature).values
    ranged = tuple(claim.with_values(values) for claim in exported.claims)
    exported = replace(exported, claims=ranged, signature=ranged[0])
    observations = observe_all(exported.signature, exported.boundaries, operators.may_choose(exported.program))
    if exported.together and not (random or eager.signature.state):
        observations = (*observations, *observe(_make_far_probes(eager, exported)))
    error = None if random else _refuse_unfollowed(eager, observations, exported, limit)
    if error is None:
        return limit.run("the choice of a claim", lambda: claims.choose(exported, observations)), observations
    eager.calling = replace(eager.calling, presumed=limit_sums(eager.calling.presumed).with_values(values))
    return error, observations


def _make_far_probes(eager: EagerSession, exported: Exported) -> list[Probe]:
    """The example at the sizes that are to be tried together."""
    signature, example = exported.signature, eager.example
    found: list[Probe] = []
    for wanted in exported.together:
        sizes = fit(signature, signature.sizes(example), wanted)
        if sizes is not None:
            named = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
            inputs = resize(example, signature, sizes)
            found.append(Probe(name=f"{named}, together", origin="made", num_records=sizes[BATCH], inputs=inputs))
    return found


def _refuse_unfollowed(
    eager: EagerSession, seen: Sequence[Observation], exported: Exported, limit: TimeLimit
) -> CaptureError | None:
    place = limit.run("what a trace does not follow", lambda: find_unfollowed(eager, seen, exported))
    return None if place is None else CaptureError(UNFOLLOWED, hint=f"{place}")


def _export(subject: Subject, far: FarSizes) -> Exported:
    """The exported program with the claims that the eager model bears out; of a trace at larger sizes where that holds
    for more. Raises CaptureError."""
    module, eager = subject.module, far.eager

    def export_at(sizes: Mapping[str, int]) -> Exported:
        return tie_sizes(eager, _trace(eager, lambda: torch_export.export_at(module, eager.calling, sizes)))

    try:
        traced = tie_sizes(eager, _trace(eager, lambda: torch_export.export(module, eager.calling)))
    except CaptureError as error:
        other = larger_trace.trace_other_examples(far, error, export_at)
        if other is None:
            raise
        traced = other
    exported = size_limits.settle(far, bound_exported(eager, traced))
    return larger_trace.widen(far, exported, export_at)


def _trace(eager: EagerSession, export: Callable[[], Exported]) -> Exported:
    """What `export` returns of the model as before its first call, where it keeps what it then makes (a mask for each
    length): a table that is there already would be a constant of the trace. Else of the model as it is."""
    if not eager.recall.find_changed():
        return export()
    with suppress(CaptureError), eager.recall.as_before():
        if not eager.changed and not any(map(is_lazy, (*eager.module.parameters(), *eager.module.buffers()))):
            return export()
    with eager.recall.preserve():
        return export()
