"""The oracle: the user's own module behind the Session interface, run as PyTorch runs it."""

import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, final

import torch

from trueline.bundle.signature import Array, Signature
from trueline.capture.model.attention import check_attention
from trueline.capture.model.explicit_state import Explicit, users_own
from trueline.capture.model.python_state import Recall
from trueline.capture.model.signature import BATCH, Calling, learn
from trueline.capture.model.stored import store
from trueline.recipe.eager_mode import as_trained
from trueline.runtime import tensors
from trueline.runtime.session import DEFAULTS, Session, SessionSettings
from trueline.runtime.tensors import to_array, to_arrays, to_tensors


@final
class EagerSession:
    """Runs `module`; learns how to call it from `example`, a small batch of inputs, and `others`.

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
        settings: SessionSettings = DEFAULTS,
    ) -> None:
        self._device = tensors.device(settings)
        self._settings = settings
        tensors.autocast(settings, self._device)  # refuses a precision before the model is called
        tensors.check_offsets()
        before = _checksums(users_own(module))
        self.recall = Recall(users_own(module))
        """The values of its plain attributes before the first call."""
        self.calling: Calling = learn(module, example, others=others, dynamic_shapes=dynamic_shapes)
        after = _checksums(users_own(module))
        self.changed = tuple(name for name, checksum in before.items() if after.get(name, checksum) != checksum)
        """Parameters and buffers that the first calls changed, as in a model that takes its scale from its first batch;
        without layers that are made on the first call (torch's lazy modules) and buffers that appear."""
        self.module = module if self._device.type == "cpu" else module.to(self._device)

    @property
    def signature(self) -> Signature:
        return self.calling.signature

    @property
    def example(self) -> dict[str, Array]:
        """The example by name."""
        return self._by_name(self.calling.example)

    @property
    def examples(self) -> list[dict[str, Array]]:
        """Every example that the user gave, by name."""
        return [self._by_name(tensors) for tensors in self.calling.batches]

    def _by_name(self, tensors: Sequence[torch.Tensor]) -> dict[str, Array]:
        return {spec.name: to_array(tensor) for spec, tensor in zip(self.signature.inputs, tensors, strict=True)}

    @property
    def initial_state(self) -> dict[str, Array]:
        """The model's initial state, by input, for a batch like the example's; empty where it has none."""
        if not isinstance(self.module, Explicit):
            return {}
        state = self.module.initial_for(self.signature.sizes(self.example)[BATCH])
        return {name: to_array(value) for name, value in state.items()}

    def run(self, inputs: Mapping[str, Array], *, fast_path: bool = False) -> dict[str, Array]:
        """Outputs by name. The caller's arrays are copied first: a module may write into its inputs. With `fast_path`
        as torch runs nn.TransformerEncoder by default in evaluation mode, see `recipe.eager_mode`."""
        outputs = self._call(inputs, fast_path=fast_path)
        return to_arrays(self.signature, outputs, cast=tensors.casts(self._settings))

    def run_stored(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """As `run`; large outputs go into a file without a copy in memory."""
        if tensors.casts(self._settings):
            return store(self.run(inputs))
        named = zip(self.signature.outputs, self._call(inputs), strict=True)
        return store({spec.name: to_array(tensor) for spec, tensor in named})

    def _call(self, inputs: Mapping[str, Array], *, fast_path: bool = False) -> tuple[torch.Tensor, ...]:
        self.signature.check(inputs)
        mode, checked = (nullcontext(), nullcontext()) if fast_path else (as_trained(), check_attention())
        # unchecked, an index beyond a sparse tensor's size writes where it leads, and ends the process
        valid = torch.sparse.check_sparse_tensor_invariants(True)  # type: ignore[no-untyped-call]
        with torch.no_grad(), mode, checked, valid, tensors.autocast(self._settings, self._device):
            return self.calling.call(self.module, to_tensors(self.signature, inputs, self._device))


def run_stored(session: Session, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """What `session` answers, large outputs in a file."""
    return session.run_stored(inputs) if isinstance(session, EagerSession) else store(session.run(inputs))


def _checksums(module: torch.nn.Module) -> dict[str, int]:
    """Of every dense parameter and buffer in this machine's memory."""
    named = chain(module.named_parameters(), module.named_buffers())
    plain = {name: value.detach().resolve_conj().contiguous() for name, value in named if _is_plain(value)}
    return {name: zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data) for name, value in plain.items()}


def _is_plain(value: torch.Tensor) -> bool:
    lazy = torch.nn.parameter.is_lazy(value)
    return not lazy and value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
