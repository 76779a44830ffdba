"""From a model to its exported program and the eager answers that every format is compared with."""

from collections.abc import Sequence

from trueline import events
from trueline.capture import claims, size_limits
from trueline.capture.export import torch_export
from trueline.capture.export.exported import Exported
from trueline.capture.proof import stateful
from trueline.capture.proof.far_sizes import FarSizes
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import LIMIT, Probe, make_probes
from trueline.capture.subject import Subject
from trueline.capture.time_limit import EXPORT_SHARE, TimeLimit
from trueline.errors import CaptureError
from trueline.runtime import distribution

ALONE = 12
"""Fewest probes of single calls for a model with a long memory, beside its sequences."""


def export_and_observe(
    subject: Subject, far: FarSizes, limit: TimeLimit, *, random: bool
) -> tuple[Exported | CaptureError, tuple[Observation, ...]]:
    """The exported program with the widest claim that it bears out, and the eager model's answers. A model that draws
    random numbers gets fewer probes, each many times."""
    eager = subject.eager
    most, num_draws = (
        (distribution.PROBES, distribution.DRAWS) if random else (max(LIMIT - stateful.num_calls(eager), ALONE), 0)
    )
    covered = stateful.covering(eager)
    events.emit("model.tracing")

    def observe(probes: Sequence[Probe]) -> tuple[Observation, ...]:
        events.emit("model.observed", probes=len(probes))
        return limit.run(f"the model on {len(probes)} probes", lambda: subject.observe(probes, num_draws=num_draws))

    try:
        exported = limit.run(
            "torch.export",
            lambda: size_limits.settle(far, torch_export.export(subject.module, eager.calling)),
            share=EXPORT_SHARE,
        )
    except CaptureError as error:
        return error, observe(make_probes(eager.example, signature=eager.calling.presumed, limit=most, covered=covered))
    observations = observe(
        make_probes(eager.example, signature=exported.signature, sizes=exported.boundaries, limit=most, covered=covered)
    )
    return limit.run("the choice of a claim", lambda: claims.choose(exported, observations)), observations
