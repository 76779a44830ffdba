"""Named arrays to a torch program's tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from trueline.bundle.signature import Signature

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


def to_tensors(
    signature: Signature, inputs: Mapping[str, Array], device: torch.device | None = None
) -> tuple[torch.Tensor, ...]:
    """Copies `inputs` into tensors in the signature's order, on `device`."""
    made = (torch.from_numpy(np.array(inputs[spec.name], order="C")) for spec in signature.inputs)
    return tuple(made if device is None else (tensor.to(device) for tensor in made))


def to_arrays(signature: Signature, found: tuple[torch.Tensor, ...], *, cast: bool = False) -> dict[str, Array]:
    """Names the outputs. They are copied: a module may go on writing into a buffer that it returned.

    `cast`: under autocast an output comes in the precision that was computed in, and goes out in the signature's.
    """
    named = zip(signature.outputs, found, strict=True)
    if cast:  # numpy has no bfloat16
        plain = ((spec, tensor.double() if tensor.is_floating_point() else tensor) for spec, tensor in named)
        return {spec.name: tensor.detach().cpu().numpy().astype(spec.dtype) for spec, tensor in plain}
    return {spec.name: tensor.detach().cpu().numpy().copy() for spec, tensor in named}
