"""AOTInductor: machine code compiled ahead of time, which libtorch runs without Python.

A package holds a shared library, and opening it runs its code: only callers that trust its maker open it
(`native=True`), and it is never chosen to serve. It drops an exported program's guards: the Session enforces the proven
range, and the package's own input check is on as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from trueline.bundle.signature import Check, Signature
from trueline.errors import BundleError, TruelineError, first_line
from trueline.runtime import tensors
from trueline.runtime.refusals import refusal_of
from trueline.runtime.session import DEFAULTS, SessionSettings
from trueline.runtime.tensors import to_arrays, to_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

FILE = "programs/model.so.pt2"
CHECK_INPUTS = "AOTI_RUNTIME_CHECK_INPUTS"


@final
class AotiSession:
    """An AOTInductor package on the CPU.

    Thread-safe: calls run one after the other. Threads above 0 set torch's intra-op threads for the whole process.
    """

    format = "aotinductor"

    def __init__(self, path: Path, signature: Signature, *, settings: SessionSettings = DEFAULTS) -> None:
        settings.on_cpu("an AOTInductor package, compiled for it,")
        settings.precise("AOTInductor", (), otherwise="the package computes as it was compiled")
        tensors.device(settings)
        os.environ.setdefault(CHECK_INPUTS, "1")
        try:
            self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        except Exception as error:
            raise BundleError(
                f"{path} is no AOTInductor package that this torch can open: {first_line(error)}"
            ) from error
        self.signature = signature
        self._check = Check(signature)
        # a second thread would wait for the package's only runner with the GIL, which the first one needs to return
        self._alone = threading.Lock()

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature."""
        self._check(inputs)
        given = list(to_tensors(self.signature, inputs))
        try:
            with self._alone:
                found = self._loader.boxed_run(given)
        except Exception as error:
            raise refusal_of(error, inputs) from error
        if len(found) != len(self.signature.outputs):
            raise TruelineError(f"the program gave {len(found)} outputs, expected {len(self.signature.outputs)}")
        return to_arrays(self.signature, tuple(found))
