"""torch.export's programs: opened from a checked `.pt2` and run. Nothing here exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_leaves

from trueline.bundle.signature import Check, Signature
from trueline.errors import BundleError
from trueline.runtime import tensors, torch_export_archive, torch_weights
from trueline.runtime.refusals import refusal_of
from trueline.runtime.session import DEFAULTS, SessionSettings
from trueline.runtime.tensors import one_line, to_arrays, to_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

FILE = "programs/model.pt2"


def load(path: Path) -> torch.export.ExportedProgram:
    """The program at `path`, after its archive was checked. Raises BundleError."""
    torch_export_archive.check(path)
    try:
        return torch.export.load(path)
    except Exception as error:
        raise BundleError(f"{path} is no program that this torch can open: {one_line(error)}") from error


def compute_eigenvalues(matrices: torch.Tensor) -> torch.Tensor:
    """`torch.linalg.eigvals`, which ends the process (SIGSEGV, torch 2.13 with oneMKL) where a matrix has no finite
    number. Raises RuntimeError there."""
    if matrices.numel() and not bool(matrices.isfinite().flatten(-2).any(dim=-1).all()):
        raise RuntimeError("linalg.eigvals: The algorithm failed to converge because the input has no finite number")
    found: torch.Tensor = torch.ops.aten.linalg_eigvals.default(matrices)
    return found


def _guard_eigenvalues(module: torch.nn.Module) -> None:
    for part in module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        found = [node for node in part.graph.nodes if node.target is torch.ops.aten.linalg_eigvals.default]
        for node in found:
            node.target = compute_eigenvalues
        if found:
            part.recompile()


@final
class ExportSession:
    """A torch.export program, on the CPU unless `settings` names a CUDA device; bf16 and fp16 are torch's autocast.

    Thread-safe. Threads above 0 set torch's intra-op threads for the whole process.
    """

    format = "torch_export"

    def __init__(self, path: Path, signature: Signature, *, settings: SessionSettings = DEFAULTS) -> None:
        self._device = tensors.device(settings)
        self._settings = settings
        tensors.autocast(settings, self._device)  # refuses a precision before anything is loaded
        program = load(path)
        if self._device.type != "cpu":
            program = move_to_device_pass(program, self._device)
        self._module = program.module(check_guards=False)
        _guard_eigenvalues(self._module)
        tensors.check_offsets()
        torch_weights.share(self._module, settings)
        self._kept = torch_weights.find_addresses(self._module)
        if len(program.graph_signature.user_inputs) != len(signature.inputs):
            raise BundleError(f"{path} takes {len(program.graph_signature.user_inputs)} inputs, not as its signature")
        self.signature = signature
        self._check = Check(signature)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature or ids beyond a table."""
        self._check(inputs)
        try:
            with torch.no_grad(), tensors.restored_vmap_levels(), tensors.autocast(self._settings, self._device):
                found = tuple(tree_leaves(self._module(*to_tensors(self.signature, inputs, self._device))))
        except Exception as error:
            raise refusal_of(error, inputs) from error
        return to_arrays(self.signature, found, cast=tensors.casts(self._settings), kept=self._kept)
