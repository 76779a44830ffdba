"""The cause of answers that differ, where it is outside of the model: a clock, the machine, a draw at one call in many.

All sources are held still, each at the first value that it gave: if the answers are then the same, they are the cause.
"""

import time

from trueline.capture.model import explicit_state
from trueline.capture.model.python_state import Memento
from trueline.capture.proof.state.influence import Influence, Inputs, Question
from trueline.capture.proof.state.sources import DRAWN, Readings, find_places, reading
from trueline.capture.proof.state.tainted import quietly
from trueline.runtime import compare

SOME, SOME_S = 20, 1.0
"""Calls with sources held still, and the seconds of this thread after which no further one is made."""


def find_source(question: Question) -> Influence | None:
    """Of a model that answers equal inputs differently: what it reads outside, if it answers them the same while all
    sources are held still. A draw may come at one call in many."""
    memento, held = Memento(explicit_state.users_own(question.eager.module)), Readings(held=True)
    started, answers = time.thread_time(), list[Inputs]()
    try:
        with quietly(), reading(held, find_places(question)):
            while len(answers) < 2 or (len(answers) < SOME and time.thread_time() - started < SOME_S):
                answers.append(question.eager.run(question.inputs))
    except Exception:  # noqa: BLE001 - the user's forward with a clock that does not move: no answer to compare
        return None
    finally:
        memento.restore()
    if not held.lines or not all(compare.compare(answers[0], one).agrees for one in answers[1:]):
        return None
    name = next((name for name in held.lines if name in DRAWN), next(iter(held.lines)))
    return Influence(path=name, how="it reads that on each call", place=held.lines[name], draws=name in DRAWN)
