"""Which operators lose the most when they are quantized: each alone, by the answers to training records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence

import numpy as np

from trueline import events, files
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import fold
from trueline.compress.apply.quantizers import QUANTIZERS
from trueline.compress.measure.kernels import list_heavy
from trueline.compress.measure.reference import Reference
from trueline.compress.method import CompressMethod
from trueline.errors import TruelineError


def rank_operators(
    reference: Reference, program: ParentProgram, method: CompressMethod, ends: float, clock: Callable[[], float]
) -> dict[str, float]:
    """The relative error of the answers for each heavy operator, the largest first; NaN, last, where no time was left.
    What was measured before a kill is kept in `program.work`. The outermost operators, which lose most in usual models,
    are measured first."""
    operators = list_heavy(fold(program))
    inputs = program.calibration()[0]
    expected = reference.open(program.path, "onnx").run(inputs)
    kept = program.work / f"{'-'.join(('sensitivity', method.kind, *method.words))}.json"
    errors: dict[str, float] = json.loads(kept.read_text()) if kept.is_file() else {}
    for number, operator in enumerate(_from_outside(operators)):
        if operator in errors:
            continue
        if clock() >= ends:
            break
        others = tuple(name for name in operators if name != operator)
        out = program.work / "alone" / "model.onnx"
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir(parents=True)
        try:
            QUANTIZERS[method.kind].apply(CompressMethod(method.kind, method.words, others), program, out)
            found = reference.open(out, method.format).run(inputs)
            errors[operator] = max(_relative(expected[name], found[name]) for name in expected)
        except TruelineError:
            errors[operator] = np.inf
        files.write_atomic(kept, json.dumps(errors).encode())
        events.emit("sensitivity.advanced", done=number + 1, total=len(operators))
    measured = sorted((name for name in operators if name in errors), key=lambda name: -errors[name])
    left = [name for name in operators if name not in errors]
    return {name: errors.get(name, np.nan) for name in (*measured, *left)}


def _from_outside(names: Sequence[str]) -> list[str]:
    """The first, the last, the second, the last but one, ...

    >>> _from_outside(["a", "b", "c", "d", "e"])
    ['a', 'e', 'b', 'd', 'c']
    """
    pairs = zip(names, reversed(names), strict=True)
    return list(dict.fromkeys(name for pair in pairs for name in pair))


def _relative(want: np.ndarray, have: np.ndarray) -> float:
    gap = np.linalg.norm((want.astype(np.float64) - have.astype(np.float64)).ravel())
    return float(gap / max(float(np.linalg.norm(want.astype(np.float64).ravel())), 1e-12))
