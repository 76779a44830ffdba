"""Emits an AOTInductor package from the exported program: C++ that torch writes and this machine's compiler
compiles, with the weights folded in (freezing: without it quantized models silently run in float32)."""

import os
import shutil
import tempfile
from pathlib import Path

import torch

from trueline.capture.export.exported import Exported
from trueline.capture.export.tracing import quiet
from trueline.capture.export.whole_numbers import refuse_large
from trueline.errors import CaptureError
from trueline.runtime.aotinductor import CHECK_INPUTS, FILE
from trueline.runtime.tensors import one_line

SETTINGS = {
    "freezing": True,
    "aot_inductor.package_cpp_only": False,
    "aot_inductor.check_lowerbound": False,  # it would be 2 for every free size; the Session enforces the proven one
}


def emit(exported: Exported, folder: Path) -> Path:
    """Writes `folder/programs/model.so.pt2`; returns its path. Raises CaptureError, also when there is no compiler."""
    refuse_large(exported)
    return compile_program(exported.program, folder / FILE)


def compile_program(program: torch.export.ExportedProgram, path: Path) -> Path:
    """Compiles `program` to `path`. Raises CaptureError, also when there is no compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise CaptureError(
            f"AOTInductor compiles C++, and there is no compiler '{compiler}' here",
            hint="install g++ (Debian: apt install g++), or name yours in CXX",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(CHECK_INPUTS, "1")
    with tempfile.TemporaryDirectory(prefix="trueline-aoti-") as scratch:
        made = Path(scratch) / "model.pt2"
        try:
            with quiet(), torch.no_grad():
                torch._inductor.aoti_compile_and_package(program, package_path=str(made), inductor_configs=SETTINGS)
        except Exception as error:
            raise CaptureError(f"AOTInductor cannot compile the model: {one_line(error)}") from error
        shutil.move(made, path)
    return path
