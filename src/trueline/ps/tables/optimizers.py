"""The optimizers of a server: torch.optim's formulas on NumPy arrays, for the rows of a table or a dense parameter.

All arrays are float32 of shape (n, dim); a dense parameter is one row. Rows are updated lazily: a row that no gradient
reaches keeps its moments, is not decayed, and its step count, which Adam's bias correction and Adagrad's decay use, is
the number of its own updates. A row that every step reaches gets what torch.optim computes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trueline.ps.messages import OptimizerSpec
from trueline.ps.tables.numba_code import find_compiled

Rows = npt.NDArray[np.float32]
WIDE, NARROW = "dim", "one"
"""A slot has as many columns as the rows, or one."""


def slots_of(spec: OptimizerSpec) -> tuple[tuple[str, str, float], ...]:
    """The slots of each row: name, WIDE or NARROW, initial value."""
    count = ("count", NARROW, 0.0)
    match spec.kind:
        case "sgd":
            buffer = (("momentum", WIDE, 0.0),) if spec.momentum else ()
            return (*buffer, count) if spec.momentum and spec.dampening else buffer
        case "adagrad":
            total = ("sum", WIDE, spec.initial_accumulator)
            return (total, count) if spec.lr_decay else (total,)
        case "rowwise_adagrad":
            total = ("sum", NARROW, spec.initial_accumulator)
            return (total, count) if spec.lr_decay else (total,)
        case _:
            return ("mean", WIDE, 0.0), ("square", WIDE, 0.0), count


def update(spec: OptimizerSpec, rows: Rows, gradients: Rows, slots: Sequence[Rows], lr: float) -> None:
    """One step, in place in `rows` and `slots` (in the order of `slots_of`). `gradients` may be overwritten."""
    if spec.maximize:
        np.negative(gradients, out=gradients)
    if spec.kind == "adamw":
        if spec.weight_decay:
            rows *= np.float32(1.0 - lr * spec.weight_decay)
    elif spec.weight_decay:
        gradients += np.float32(spec.weight_decay) * rows
    _STEPS[spec.kind](spec, rows, gradients, slots, lr)


CompiledStep = Callable[[Rows, npt.NDArray[np.int64], Rows, Sequence[Rows], float], None]
"""Of rows, the places of those that change, their gradients, slots and the learning rate."""


def find_step(spec: OptimizerSpec) -> CompiledStep | None:
    """`update` in one pass, with the same bits; None where it is not compiled: plain SGD is, and Adagrad without
    decays."""
    plain = not (spec.momentum or spec.weight_decay or spec.maximize)
    step = None
    if plain and (spec.kind == "sgd" or (spec.kind == "adagrad" and not spec.lr_decay)):
        step = find_compiled(spec.kind)
    if step is None:
        return None

    def run(rows: Rows, places: npt.NDArray[np.int64], gradients: Rows, slots: Sequence[Rows], lr: float) -> None:
        rest = (np.float32(spec.eps),) if slots else ()
        step(rows, *slots, places, np.ascontiguousarray(gradients), np.float32(lr), *rest)

    return run


def _step_sgd(spec: OptimizerSpec, rows: Rows, gradients: Rows, slots: Sequence[Rows], lr: float) -> None:
    step = gradients
    if spec.momentum:
        buffer = slots[0]
        buffer *= np.float32(spec.momentum)
        if spec.dampening:
            count = slots[1]  # the first gradient is not dampened
            buffer += gradients * np.where(count == 0, np.float32(1.0), np.float32(1.0 - spec.dampening))
            count += 1
        else:
            buffer += gradients
        step = gradients + np.float32(spec.momentum) * buffer if spec.nesterov else buffer
    rows -= np.multiply(step, np.float32(lr), out=gradients)


def _step_adagrad(spec: OptimizerSpec, rows: Rows, gradients: Rows, slots: Sequence[Rows], lr: float) -> None:
    rate: Any = np.float32(lr)
    if spec.lr_decay:
        rate = np.float32(lr) / (1 + slots[1] * np.float32(spec.lr_decay))
        slots[1][...] += 1
    squares = gradients * gradients
    slots[0][...] += squares.mean(axis=1, keepdims=True) if spec.kind == "rowwise_adagrad" else squares
    gradients *= rate
    gradients /= np.sqrt(slots[0]) + np.float32(spec.eps)
    rows -= gradients


def _step_adam(spec: OptimizerSpec, rows: Rows, gradients: Rows, slots: Sequence[Rows], lr: float) -> None:
    mean, square, count = slots
    first, second = spec.betas
    count += 1
    mean += np.float32(1.0 - first) * (gradients - mean)
    square *= np.float32(second)
    gradients *= gradients
    gradients *= np.float32(1.0 - second)
    square += gradients
    steps = count.astype(np.float64)  # a power of float32 is too coarse after thousands of steps
    size = (lr / (1.0 - first**steps)).astype(np.float32)
    scale = np.sqrt(1.0 - second**steps).astype(np.float32)
    step = np.sqrt(square)
    step /= scale
    step += np.float32(spec.eps)
    np.divide(mean, step, out=step)
    step *= size
    rows -= step


_STEPS = {
    "sgd": _step_sgd, "adagrad": _step_adagrad, "rowwise_adagrad": _step_adagrad, "adam": _step_adam,
    "adamw": _step_adam,
}  # fmt: skip
