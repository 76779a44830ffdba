"""Which operators lose the most when they are quantized: each kind alone, then each operator of the kinds that matter,
by the answers to training records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from trueline import events, files
from trueline.compress.apply.choose import REMOVABLE, choose_operators
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import fold
from trueline.compress.apply.quantizers import QUANTIZERS
from trueline.compress.measure.kernels import HEAVY
from trueline.compress.measure.reference import Reference
from trueline.compress.method import CompressMethod
from trueline.errors import TruelineError

_MATTERS = 0.05
"""Of the largest error of a kind: operators of light kinds that are below it are not measured one by one."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Relative errors of the answers with these alone quantized, the largest first."""

    operators: dict[str, float]
    """NaN, last, where no time was left."""
    kinds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """Quantizes some operators and no others, and remembers how far the answers are off, in `program.work`."""

    reference: Reference
    program: ParentProgram
    method: CompressMethod
    operators: Sequence[str]
    errors: dict[str, float]

    def measure(self, name: str, quantized: Sequence[str]) -> float:
        if name not in self.errors:
            self.errors[name] = self._compare(set(quantized))
            files.write_atomic(_file_of(self.program, self.method), json.dumps(self.errors).encode())
        return self.errors[name]

    def _compare(self, quantized: set[str]) -> float:
        others = tuple(name for name in self.operators if name not in quantized)
        out = self.program.work / "alone" / "model.onnx"
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir(parents=True)
        inputs = self.program.calibration()[0]
        expected = self.reference.open(self.program.path, "onnx").run(inputs)
        try:
            method = CompressMethod(self.method.kind, self.method.words, others)
            QUANTIZERS[method.kind].apply(method, self.program, out)
            found = self.reference.open(out, method.format).run(inputs)
        except TruelineError:
            return float("inf")
        return max(_relative(expected[name], found[name]) for name in expected)


def rank_operators(
    reference: Reference, program: ParentProgram, method: CompressMethod, ends: float, clock: Callable[[], float]
) -> Blame:
    """Operators of all kinds that `method` rounds. What was measured before a kill is kept in `program.work`. The
    outermost operators of a kind, which lose most in usual models, are measured first."""
    model = onnx.load(fold(program), load_external_data=False)
    chosen = choose_operators(model, heavy=method.kind != "static")
    chosen = {name: kind for name, kind in chosen.items() if kind not in REMOVABLE}
    kept = _file_of(program, method)
    errors: dict[str, float] = json.loads(kept.read_text()) if kept.is_file() else {}
    alone = _Alone(reference=reference, program=program, method=method, operators=list(chosen), errors=errors)
    groups = {kind: [name for name, own in chosen.items() if own == kind] for kind in dict.fromkeys(chosen.values())}
    kinds: dict[str, float] = {}
    for kind, names in groups.items():
        if len(groups) > 1 and clock() < ends:
            kinds[kind] = alone.measure(f"every {kind}", names)
    order = sorted(groups, key=lambda kind: -kinds.get(kind, 0.0))
    least = _MATTERS * max(kinds.values(), default=0.0)
    ranked = [
        name for kind in order if kind in HEAVY or kinds.get(kind, np.inf) >= least
        for name in _from_outside(groups[kind])
    ]  # fmt: skip
    for number, name in enumerate(ranked):
        if clock() < ends:
            alone.measure(name, [name])
            events.emit("sensitivity.advanced", done=number + 1, total=len(ranked))
    return Blame(
        {name: errors.get(name, np.nan) for name in sorted(ranked, key=lambda name: -errors.get(name, -1.0))},
        {kind: kinds[kind] for kind in order if kind in kinds},
    )


def _file_of(program: ParentProgram, method: CompressMethod) -> Path:
    return program.work / f"{'-'.join(('sensitivity', method.kind, *method.words))}.json"


def _from_outside(names: Sequence[str]) -> list[str]:
    """The first, the last, the second, the last but one, ...

    >>> _from_outside(["a", "b", "c", "d", "e"])
    ['a', 'e', 'b', 'd', 'c']
    """
    pairs = zip(names, reversed(names), strict=True)
    return list(dict.fromkeys(name for pair in pairs for name in pair))


def _relative(want: np.ndarray, have: np.ndarray) -> float:
    gap = np.linalg.norm((want.astype(np.float64) - have.astype(np.float64)).ravel())
    found = float(gap / max(float(np.linalg.norm(want.astype(np.float64).ravel())), 1e-12))
    return found if np.isfinite(found) else float("inf")
