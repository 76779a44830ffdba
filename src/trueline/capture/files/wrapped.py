"""A program that came as a file, with what is to be known to prove it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trueline.bundle import Signature
from trueline.capture.proof.probes import Probe
from trueline.capture.proof.prove import Observation, observe
from trueline.runtime.session import Format, Session

Kind = Literal["onnx", "torch_export", "torchscript"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """A file as a subject of proof: what it claims, who answers for it, and how each format is made of it."""

    kind: Kind
    signature: Signature
    oracle: Session
    against: str
    observations: tuple[Observation, ...]
    emit: dict[Format, Callable[[Path], Path]]


def observed(oracle: Session, probes: Sequence[Probe]) -> tuple[Observation, ...]:
    """What the file answers. The probes are made up, so a size that it claims and cannot answer is held against it."""
    return tuple(
        replace(seen, probe=replace(seen.probe, origin="given")) if seen.outputs is None else seen
        for seen in observe(oracle, probes)
    )
