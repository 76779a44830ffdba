"""The oracle: the user's own module behind the Session seam, run as PyTorch runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from trueline.bundle.signature import Signature
from trueline.capture.model import explicit_state, first_call
from trueline.capture.model.explicit_state import Explicit
from trueline.capture.model.python_state import Recall
from trueline.capture.model.signature import BATCH, Calling, as_trained, learn
from trueline.errors import CaptureError
from trueline.runtime import torch_settings
from trueline.runtime.settings import DEFAULTS, Settings
from trueline.runtime.tensors import to_arrays, to_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


@final
class EagerSession:
    """Runs `module`, whose calling convention is learnt from `example`, a small batch of inputs, and `others`.

    With a device in `settings`, `module` itself is moved there.
    """

    format = "eager"

    def __init__(
        self,
        module: torch.nn.Module,
        example: Any,
        *,
        others: Sequence[Any] = (),
        dynamic_shapes: Mapping[str, Any] | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        self._device = torch_settings.device(settings)
        self._settings = settings
        torch_settings.autocast(settings, self._device)  # refuses a precision before the model is called
        before = first_call.marks(explicit_state.users_own(module))
        self.recall = Recall(explicit_state.users_own(module))
        """What its plain attributes held before it was called with its example."""
        self.calling: Calling = learn(module, example, others=others, dynamic_shapes=dynamic_shapes)
        self.changed: tuple[str, ...] = first_call.changed(before, explicit_state.users_own(module))
        """Parameters and buffers that were another before the model was called with its example."""
        self.module = module if self._device.type == "cpu" else module.to(self._device)

    @property
    def signature(self) -> Signature:
        return self.calling.signature

    @property
    def example(self) -> dict[str, Array]:
        """The example by name."""
        return {
            spec.name: tensor.numpy() for spec, tensor in zip(self.signature.inputs, self.calling.example, strict=True)
        }

    @property
    def beginning(self) -> dict[str, Array]:
        """The state that the model begins with, by input, for a batch like the example's; empty where it has none."""
        if not isinstance(self.module, Explicit):
            return {}
        state = self.module.beginning(self.signature.sizes(self.example)[BATCH])
        return {name: value.detach().cpu().numpy() for name, value in state.items()}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. The caller's arrays are copied first: a module may write into its inputs."""
        self.signature.check(inputs)
        with torch.no_grad(), as_trained(), torch_settings.autocast(self._settings, self._device):
            found = self.calling.call(self.module, to_tensors(self.signature, inputs, self._device))
        if len(found) != len(self.signature.outputs):
            raise CaptureError(
                f"the model returned {len(found)} tensors, and {len(self.signature.outputs)} on its example",
                hint="a bundle has the same outputs for every request: return all of them always, and a flag that says "
                "which hold",
            )
        return to_arrays(self.signature, found, cast=torch_settings.casts(self._settings))


@final
class CompiledSession:
    """`module` as torch.compile makes it, for any batch size: to compare with. Thread-safe as torch.compile is."""

    format = "compile"

    def __init__(
        self, module: torch.nn.Module, example: Any, *, backend: str = "inductor", settings: Settings = DEFAULTS
    ) -> None:
        self._eager = EagerSession(module, example, settings=settings)
        compiled: Any = torch.compile(module, dynamic=True, backend=backend)
        self._eager.module = compiled

    @property
    def signature(self) -> Signature:
        return self._eager.signature

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature."""
        return self._eager.run(inputs)
