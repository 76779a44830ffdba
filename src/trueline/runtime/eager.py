"""The oracle: the user's own module behind the Session seam, run as PyTorch runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from trueline.bundle.signature import Signature
from trueline.errors import CaptureError
from trueline.runtime.calling import Calling, as_trained, learn

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


@final
class EagerSession:
    """Runs `module`, whose calling convention is learnt from `example`, a small batch of inputs, and `others`."""

    format = "eager"

    def __init__(
        self,
        module: torch.nn.Module,
        example: Any,
        *,
        others: Sequence[Any] = (),
        dynamic_shapes: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.calling: Calling = learn(module, example, others=others, dynamic_shapes=dynamic_shapes)

    @property
    def signature(self) -> Signature:
        return self.calling.signature

    @property
    def example(self) -> dict[str, Array]:
        """The example by name."""
        return {
            spec.name: tensor.numpy() for spec, tensor in zip(self.signature.inputs, self.calling.example, strict=True)
        }

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. The caller's arrays are copied first: a module may write into its inputs."""
        self.signature.check(inputs)
        with torch.no_grad(), as_trained():
            found = self.calling.call(self.module, to_tensors(self.signature, inputs))
        if len(found) != len(self.signature.outputs):
            raise CaptureError(
                f"the model returned {len(found)} tensors, and {len(self.signature.outputs)} on its example",
                hint="a bundle has the same outputs for every request",
            )
        return to_arrays(self.signature, found)


def to_tensors(signature: Signature, inputs: Mapping[str, Array]) -> tuple[torch.Tensor, ...]:
    """Copies `inputs` into tensors in the signature's order."""
    return tuple(torch.from_numpy(np.array(inputs[spec.name], order="C")) for spec in signature.inputs)


def to_arrays(signature: Signature, found: tuple[torch.Tensor, ...]) -> dict[str, Array]:
    """Names the outputs. They are copied: a module may go on writing into a buffer that it returned."""
    return {spec.name: tensor.detach().numpy().copy() for spec, tensor in zip(signature.outputs, found, strict=True)}
