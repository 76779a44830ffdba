"""What a model does seldom: on a draw of Python's or numpy's random numbers, or after many calls.

Asked twice the same, a model that drops a layer once in twenty calls, or that warms up for a thousand, mostly answers
the same twice; an exporter freezes what it saw, and no probe shows it. Draws of torch stay in the program and are no
matter of this file. So a model that draws elsewhere is asked many times, and one that counts its calls is asked as if
many calls had been made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.code_paths import Event
from trueline.capture.model.python_state import Kept, attributes, defaults
from trueline.capture.proof import determinism
from trueline.capture.proof.determinism import ATTRIBUTE_HINT, OUTSIDE_HINT, Unsteady
from trueline.runtime import compare

if TYPE_CHECKING:
    import torch

    from trueline.bundle.signature import Array
    from trueline.capture.model.eager import EagerSession

MANY, BUDGET_S = 200, 2.0
"""Questions to a model that draws, and the seconds of this thread after which no further one is asked."""
WIDTH = 100
"""Numbers of a collection that are looked at."""
COUNTS = (9, 10, 99, 100, 999, 1000, 9999, 10_000, 1_000_000)
"""Calls that a counter is said to have seen."""


def seldom(eager: EagerSession) -> Unsteady | None:
    """Why a model that answered twice the same is no function of its inputs; None when nothing shows it."""
    users = explicit_state.users_own(eager.module)
    drawn, counted = determinism.random_states(), _whole_numbers(users)
    with code_paths.watching() as way:
        answer = eager.run(eager.example)
    if determinism.random_states() != drawn:
        return _drawn(eager, answer, way)
    before = {one.path: one.value for one in counted}
    changed = [one for one in _whole_numbers(users) if before.get(one.path) != one.value]
    return _counted(eager, answer, changed, way)


def _drawn(eager: EagerSession, answer: dict[str, Array], way: Sequence[Event]) -> Unsteady | None:
    started = time.thread_time()
    for number in range(2, MANY + 1):
        found = compare.compare(answer, eager.run(eager.example))
        if not found.agrees:
            return Unsteady(
                why="the model is not deterministic in evaluation mode: it draws random numbers outside of torch, and "
                f"the same question was answered differently the {number}th time ({found.reason})",
                place=code_paths.reading(way, "rand"),
                hint=OUTSIDE_HINT,
            )
        if time.thread_time() - started > BUDGET_S:
            break
    return None


def _whole_numbers(module: torch.nn.Module) -> list[Kept]:
    """What is kept that is a whole number, or holds one."""
    found: list[Kept] = []
    for kept in chain(attributes(module), defaults(module)):
        value = kept.value
        if type(value) is int:
            found.append(kept)
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        found += [
            Kept(path=f"{kept.path}[{key!r}]", holder=value, name=key, value=one)
            for key, one in islice(inside, WIDTH)
            if type(one) is int
        ]
    return found


def _counted(
    eager: EagerSession, answer: dict[str, Array], counters: Sequence[Kept], way: Sequence[Event]
) -> Unsteady | None:
    for counter in counters:
        for count in COUNTS:
            counter.put(count)
            try:
                found = compare.compare(answer, eager.run(eager.example))
            except Exception:  # noqa: BLE001 - the user's forward at a count it may not know: no answer to compare
                continue
            finally:
                counter.put(counter.value)
            if not found.agrees:
                return Unsteady(
                    why=f"the model keeps a state in the Python attribute {counter.path}: it answers differently when "
                    f"that is {count} ({found.reason})",
                    place=code_paths.reading(way, counter.path.partition("[")[0].rpartition(".")[2]),
                    hint=ATTRIBUTE_HINT,
                )
    return None
