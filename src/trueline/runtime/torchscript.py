"""TorchScript: a program that keeps Python's control flow and that libtorch runs without Python.

torch has deprecated it; it is the last rung of the ladder, for models that no graph can represent and for C++ programs.
It has no ranges: the Session enforces the proven one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from trueline.bundle.signature import Check, Signature
from trueline.errors import BundleError, TruelineError
from trueline.runtime import tensors, torch_weights, torchscript_archive
from trueline.runtime.refusals import refusal_of
from trueline.runtime.session import DEFAULTS, SessionSettings
from trueline.runtime.tensors import to_arrays, to_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

FILE = "programs/model.ts"


@contextlib.contextmanager
def ignore_deprecation() -> Iterator[None]:
    """Silences torch's warning at every call of torch.jit; the bundle's notes say it once."""
    with warnings.catch_warnings():
        # A tracer warning is no signal: see docs/concepts/proof.md.
        warnings.filterwarnings("ignore", category=torch.jit._trace.TracerWarning)
        warnings.filterwarnings("ignore", message=r".*`?torch\.jit\.\w+`? is (deprecated|not supported)")
        yield


def open_module(path: Path, device: torch.device | str = "cpu") -> Any:
    """The torch.jit.ScriptModule, after a check that it only computes. Raises BundleError."""
    torchscript_archive.check(path)
    try:
        with ignore_deprecation():
            return torch.jit.load(str(path), map_location=device).eval()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise BundleError(f"{path} is no TorchScript program that this torch can open: {first(error)}") from error


@final
class TorchScriptSession:
    """A TorchScript program, on the CPU unless `settings` names a CUDA device.

    Thread-safe. Threads above 0 set torch's intra-op threads for the whole process.
    """

    format = "torchscript"

    def __init__(self, path: Path, signature: Signature, *, settings: SessionSettings = DEFAULTS) -> None:
        settings.precise("TorchScript", (), otherwise="open the torch_export program for autocast")
        self._device = tensors.device(settings)
        self._module = open_module(path, self._device)
        tensors.check_offsets()
        torch_weights.share(self._module, settings)
        forward: Any = self._module.forward
        taken = [argument.name for argument in forward.schema.arguments[1:]]
        if len(taken) != len(signature.inputs):
            raise BundleError(f"{path} takes {len(taken)} inputs, its signature says {len(signature.inputs)}")
        self.signature = signature
        self._check = Check(signature)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature or ids beyond a table."""
        self._check(inputs)
        try:
            # unchecked, an index beyond a sparse tensor's size ends the process
            checked = torch.sparse.check_sparse_tensor_invariants(True)  # type: ignore[no-untyped-call]
            with torch.inference_mode(), checked:
                found = self._module(*to_tensors(self.signature, inputs, self._device))
        except Exception as error:
            raise refusal_of(error, inputs) from error
        answer = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if len(answer) != len(self.signature.outputs):
            raise TruelineError(f"the program gave {len(answer)} outputs, expected {len(self.signature.outputs)}")
        return to_arrays(self.signature, answer)


def first(error: Exception) -> str:
    """A TorchScript error in one line: the last one, below the program's own call stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next(
        (line for line in reversed(lines) if line.partition(":")[0].endswith("Error")), lines[0] if lines else ""
    )
    return told or type(error).__name__
