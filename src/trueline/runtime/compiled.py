"""torch.compile behind the Session seam, to compare with: needs the model's own code, so no bundle holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from trueline.bundle.signature import Signature
from trueline.capture.model.eager import EagerSession
from trueline.runtime.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


@final
class CompiledSession:
    """`module` as torch.compile makes it, for any batch size. Thread-safe as far as torch.compile is."""

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
