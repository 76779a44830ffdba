"""What a model changes in itself when it is first called: something that it takes from its data, or numbers that each
call writes before it reads them."""

from collections.abc import Sequence

import torch

from trueline.capture.model import explicit_state
from trueline.capture.model.eager import EagerSession
from trueline.errors import join_names
from trueline.runtime import compare

FILLED = (1234.0, -77.0)
"""What the buffers hold before two more calls. No large numbers: a model may multiply what it never wrote by 0."""


def explain_change(eager: EagerSession) -> tuple[str, str]:
    """Why a model that changed `eager.changed` cannot be captured as it is, and what to do."""
    names = join_names(eager.changed)
    if _works_in(eager, eager.changed):
        return (
            f"the model works in its own buffers when it is called ({names}), and a program keeps none between calls; "
            "its answer to the example does not depend on what they held before",
            "work in a tensor of the call: make it in forward (torch.zeros(64, device=x.device)) in place of "
            "register_buffer",
        )
    return (
        f"the model changes itself when it is first called ({names}): what it answers depends on the input that came "
        "first",
        "call it on its data once and capture what it then is (a checkpoint of it), or write only `if self.training`",
    )


def _works_in(eager: EagerSession, names: Sequence[str]) -> bool:
    """Whether the names are buffers, and the answer to the example is the same whatever they held before it."""
    users = explicit_state.users_own(eager.module)
    first = eager.run(eager.example)
    for value in FILLED:
        with explicit_state.preserve_buffers(users):
            buffers = dict(users.named_buffers())
            if not set(names) <= buffers.keys():
                return False
            for name in names:
                _fill(buffers[name], value)
            try:
                answer = eager.run(eager.example)
            except Exception:  # noqa: BLE001 - the user's forward with other numbers: it reads them
                return False
        if not compare.compare(first, answer).agrees:
            return False
    return True


def _fill(buffer: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        buffer.fill_(value if buffer.is_floating_point() or buffer.is_complex() else int(value > 0))
