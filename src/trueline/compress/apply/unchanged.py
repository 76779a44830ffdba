"""No quantization: the program of a model that was pruned or taught, as it was captured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import onnx

from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import save
from trueline.compress.measure.kernels import Kernels
from trueline.compress.method import CompressMethod


@final
class NoQuantizer:
    def list_variants(self) -> Sequence[CompressMethod]:
        return []

    def apply(self, method: CompressMethod, program: ParentProgram, out: Path) -> None:
        save(onnx.load(program.path), out)

    def find_fault(self, kernels: Kernels) -> str:
        return ""
