"""Says in which mode an nn.TransformerEncoder is captured, and where a plain call of the model answers otherwise."""

import time
import warnings
from itertools import islice

from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.probes import make_probes
from trueline.errors import first_line
from trueline.recipe.eager_mode import USES_FAST_PATH
from trueline.runtime import compare

NUM_ASKED, ENOUGH, BUDGET_S = 12, 3, 1.0
"""Probes on which both modes are compared, those of the user's own records first, and how many of them when that takes
more seconds of this thread than that."""


def describe(eager: EagerSession) -> str:
    """One sentence where torch's fast path would change an answer, with the first probe that shows it; else empty.

    A model without a module that has a fast path is not called.
    """
    part = next((part for part in eager.module.modules() if isinstance(part, USES_FAST_PATH)), None)
    if part is None:
        return ""
    probes = make_probes(eager.example, signature=eager.calling.presumed)
    values = [probe for probe in probes if probe.wild]  # masks among them
    asked, shown, started = 0, list[str](), time.thread_time()
    for probe in islice([probes[0], *values, *probes[1:]], NUM_ASKED):
        if asked >= ENOUGH and time.thread_time() - started > BUDGET_S:
            break
        try:
            trained = eager.run(probe.inputs)
        except Exception:  # noqa: BLE001 - the user's forward on made-up values may raise anything
            continue
        asked += 1
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
                plain = eager.run(probe.inputs, fast_path=True)
            why = compare.compare(trained, plain).reason
        except Exception as error:  # noqa: BLE001 - torch's fast path raises where all positions are masked
            why = f"it raises {type(error).__name__}: {first_line(error)}"
        if why:
            shown.append(f"'{probe.name}': {why}")
    if not shown:
        return ""
    return (
        f"{type(part).__name__} runs as in training, without torch's fast path; evaluate, predict and the server "
        f"answer so too. A plain call in evaluation mode answers {len(shown)} of {asked} probes otherwise, "
        f"first {shown[0]}"
    )
