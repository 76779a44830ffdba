"""What a model changes in itself when it is first called: something that it takes from its data, numbers that each call
writes before it reads them, or a weight that each call puts within its limits (`self.weight.data.clamp_(0, 1)`)."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from trueline.capture.model import explicit_state
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.state.influence import Inputs
from trueline.errors import join_names
from trueline.runtime import compare

FILLED = (1234.0, -77.0)
"""What the buffers hold before two more calls. No large numbers: a model may multiply what it never wrote by 0."""

SCALES = (1.0, 100.0)
"""Of the weights that a model is given to put within its limits."""


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
    if _changes_at_each_call(eager):
        return (
            f"each call of the model changes its own weights again ({names}), and a program keeps them as they are",
            "leave the parameter as it is and compute with a changed copy (weight = F.normalize(self.weight, dim=1), "
            "then F.linear(x, weight)), or change it once in __init__",
        )
    return (
        f"the model changes itself when it is first called ({names}): what it answers depends on the input that came "
        "first",
        "call it on its data once and capture what it then is (a checkpoint of it), or write only `if self.training`",
    )


def keeps_limits(eager: EagerSession) -> bool:
    """Whether the first call made of the weights what each call makes of them, whatever its input, and further calls
    leave them so: with other weights, two calls have the same effect and the same answer as one, on each of several
    inputs. Not shown where inputs are whole numbers: which rows of a table a call changes may follow from them
    (`torch.nn.Embedding(max_norm=1.0)`)."""
    weights = _changed_weights(eager)
    if not weights or any(one.dtype.kind != "f" for one in eager.example.values()):
        return False
    kept = {name: one.detach().clone() for name, one in weights.items()}
    inputs = _vary(eager.example)
    try:
        settled = [_call(eager, weights, given)[1] for given in inputs]
        if not all(_are_same(one, kept) for one in settled):
            return False
        return all(_limits_again(eager, weights, inputs, _spread(kept, scale)) for scale in SCALES)
    except Exception:  # noqa: BLE001 - the user's forward with other numbers: nothing is shown
        return False
    finally:
        _write_weights(weights, kept)


Weights = Mapping[str, torch.Tensor]


def _changed_weights(eager: EagerSession) -> Weights:
    """The parameters that the first calls changed; none where they changed anything else."""
    users = explicit_state.users_own(eager.module)
    weights = {name: one for name, one in users.named_parameters() if name in eager.changed}
    plain = weights.keys() == set(eager.changed) and all(one.is_floating_point() for one in weights.values())
    return weights if plain else {}


def _changes_at_each_call(eager: EagerSession) -> bool:
    """Whether each call changes the weights, and in the same way whatever its input."""
    weights = _changed_weights(eager)
    kept = {name: one.detach().clone() for name, one in weights.items()}
    made: list[Weights] = []
    try:
        for given in _vary(eager.example) if weights else ():
            _write_weights(weights, kept)
            made.append(_call(eager, weights, given)[1])
    except Exception:  # noqa: BLE001 - the user's forward with other numbers: nothing is shown
        return False
    finally:
        _write_weights(weights, kept)
    alike = bool(made) and all(_are_same(made[0], one) for one in made[1:])
    return alike and not any(torch.equal(made[0][name], one) for name, one in kept.items())


def _limits_again(eager: EagerSession, weights: Weights, inputs: Sequence[Inputs], others: Weights) -> bool:
    """Whether each input makes the same of `others`, all of which change, and a second call nothing more."""
    made: list[Weights] = []
    for given in inputs:
        _write_weights(weights, others)
        first, once = _call(eager, weights, given)
        second, twice = _call(eager, weights, given)
        same = all(second[name].tobytes() == array.tobytes() for name, array in first.items())
        if not same or not _are_same(once, twice):
            return False
        made.append(once)
    untouched = any(torch.equal(made[0][name], one) for name, one in others.items())
    return not untouched and all(_are_same(made[0], one) for one in made[1:])


def _call(eager: EagerSession, weights: Weights, given: Inputs) -> tuple[Inputs, Weights]:
    answer = eager.run(given)
    return answer, {name: one.detach().clone() for name, one in weights.items()}


def _write_weights(weights: Weights, numbers: Weights) -> None:
    with torch.no_grad():
        for name, one in weights.items():
            one.copy_(numbers[name])


def _are_same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


def _spread(kept: Weights, scale: float) -> Weights:
    """Weights beyond what those that the model keeps are."""
    random = torch.Generator().manual_seed(0)
    return {
        name: 3 * one + scale * (1 + one.abs()) * torch.randn(one.shape, generator=random).to(one.dtype)
        for name, one in kept.items()
    }


def _vary(example: Inputs) -> list[Inputs]:
    """The example, and numbers of other signs and sizes: a limit that is taken from the input is then another."""
    return [
        example,
        *(
            {
                name: np.asarray(np.multiply(one, by) + more, one.dtype) if one.dtype.kind == "f" else one
                for name, one in example.items()
            }
            for by, more in ((-2, 1), (0.01, 0), (1000, 7))
        ),
    ]


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
