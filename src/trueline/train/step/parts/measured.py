"""Tries what a loop measures while it trains, before the first step: members measure different chunks of the records.

sums        of two chunks together they are those of the one and of the other, not means
no memory   the first chunk has the same sums again, after others: nothing is kept, and nothing drawn
no trace    the model is in the modes that it was in, and no parameter or buffer was changed
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trueline.errors import UsageError
from trueline.train.step.validation import Validation

AGAIN, ADDED = 1e-3, 5e-2
"""How far the same records may be off, and those of two chunks together: a batch of another size is rounded otherwise,
and an answer may become another one."""
_HINT = "measure(start, stop) returns the sums over these records (reduction='sum', a number of right answers) and "


def expect_sums(validation: Validation, model: torch.nn.Module) -> str:
    """Raises UsageError if `validation.measure` returns no sums, or changes `model`. Returns why it could not be tried;
    empty if it was. It is called four times."""
    modes, values = _read_modes(model), _read_versions(model)
    first, *others = validation.chunks()[:2]
    try:
        one = validation.measure(*first)
        parts = [one, *(validation.measure(*other) for other in others)]
        whole = validation.measure(first[0], [first, *others][-1][1])
        again = validation.measure(*first)
    except Exception as error:  # noqa: BLE001  a user's code may raise anything; an evaluation shows it
        return f"{type(error).__name__}: {error}"
    names = ("loss", *validation.names)
    if any(len(sums) != len(names) for sums in (*parts, whole, again)):
        raise UsageError(
            f"measure of the validation returns {len(one)} numbers; expected {len(names)}: {', '.join(names)}",
            hint="the first is the sum of the losses, the others are sums of the metrics in the order of names=",
        )
    if _read_modes(model) != modes or _read_versions(model) != values:
        what = "leaves the model in another mode" if _read_modes(model) != modes else "changes the model's numbers"
        raise UsageError(
            f"measure of the validation {what}: a worker that joins after an evaluation would train another one",
            hint="model.eval() and torch.no_grad() before it computes, model.train() afterwards",
        )
    later = f"of records {first[0]} to {first[1] - 1} after others were measured"
    _expect_near(names, (one, again), AGAIN, later, "keeps nothing and draws nothing")
    added, last = [sum(column) for column in zip(*parts, strict=True)], [first, *others][-1][1] - 1
    together = f"of records {first[0]} to {last} measured together"
    _expect_near(names, (added, whole), ADDED, together, "nothing else: the job divides by the number of all records")
    return ""


def _expect_near(
    names: Sequence[str], sums: tuple[Sequence[float], Sequence[float]], most: float, when: str, hint: str
) -> None:
    for name, one, other in zip(names, *sums, strict=True):
        if math.isfinite(one) and not math.isclose(one, other, rel_tol=most, abs_tol=1e-6):
            raise UsageError(f"{name} of the validation is {one:.6g}, and {other:.6g} {when}", hint=f"{_HINT}{hint}")


def _read_modes(model: torch.nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


def _read_versions(model: torch.nn.Module) -> list[int]:
    return [value._version for value in (*model.parameters(), *model.buffers())]
