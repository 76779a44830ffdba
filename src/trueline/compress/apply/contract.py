"""The seam: a Quantizer makes a smaller program of a program. All share `tests/conformance/quantizer.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trueline.compress.method import CompressMethod

if TYPE_CHECKING:
    from trueline.bundle.signature import Array, Signature
    from trueline.compress.measure.kernels import Kernels

Calibration = Callable[[], Sequence["dict[str, Array]"]]
"""Inputs of training records, batch by batch, read when they are first needed."""


@dataclass(frozen=True, slots=True)
class ParentProgram:
    """The program that is compressed, and a folder for what can be used again by the next method."""

    path: Path
    work: Path
    calibration: Calibration
    notes: dict[str, str] = field(default_factory=dict)
    """What a quantizer has to say of the program, by its kind."""
    exported: Path | None = None
    """The same as a torch.export program, where the bundle has one, with its signature."""
    signature: Signature | None = None


class Quantizer(Protocol):
    def list_variants(self) -> Sequence[CompressMethod]:
        """What a search tries, the most promising first."""
        ...

    def apply(self, method: CompressMethod, program: ParentProgram, out: Path) -> None:
        """Writes the compressed program to `out`. Raises CaptureError, in words, where it cannot be made."""
        ...

    def find_fault(self, kernels: Kernels) -> str:
        """Why a program with these kernels is not what `apply` should have made; empty: it is."""
        ...
