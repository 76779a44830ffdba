"""The result of an export: a program and the signatures that it claims."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trueline.bundle.signature import Signature, TensorSpec
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.signature import BATCH
from trueline.errors import CaptureError

STATE_HINT = (
    "`trueline capture --state explicit` makes it an input and an output that the caller hands on; or return the new "
    "value yourself, or write only `if self.training`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported program with the signature that it claims."""

    program: torch.export.ExportedProgram
    signature: Signature
    symbols: dict[str, str]
    """torch's name of a symbol -> its name in the signature."""
    claims: tuple[Signature, ...]
    """From the widest to the strictest; `signature` is one of them."""
    boundaries: Mapping[str, tuple[int, ...]]
    """Sizes of each symbol on both sides of a guard or range, to be probed."""
    weight_bytes: int
    together: Sequence[Mapping[str, int]] = ()
    """Far sizes of several symbols that only the wider claims have, to be probed."""
    how: str = ""
    """How the model was traced, if not as it is."""
    opset: int | None = None
    exact_tails: bool = False
    """Whether ONNX computes sigmoids by their formula."""
    only_torch: str = ""
    """Why no other runtime can round as the model does; empty where another one may."""
    unrolled: frozenset[str] = frozenset()
    """Symbols whose guards are not all known, as code was unrolled over them: they are claimed as far as they were
    compared."""
    arrays: frozenset[SourceLine] = frozenset()
    """The user's lines where numpy reads tensors, and the trace followed it."""
    keyed: SourceLine | None = None
    """The first line that makes a key or a text of a size, which the trace decided once."""


class Fixed(CaptureError):
    """A free dimension became a constant."""

    def __init__(self, message: str, *, hint: str, symbol: str, size: int) -> None:
        super().__init__(message, hint=hint)
        self.symbol, self.size = symbol, size


def count_weight_bytes(program: torch.export.ExportedProgram) -> int:
    weights = [*program.state_dict.values(), *program.constants.values()]
    return sum(w.numel() * w.element_size() for w in weights if isinstance(w, torch.Tensor))


def fixed_error(spec: TensorSpec, axis: int, size: int, fixed: Mapping[int, SourceLine]) -> Fixed:
    """The error for a dimension that a program has `size` of only. `fixed`: the line that wrote the number."""
    symbol = str(spec.shape[axis])
    what = "batches" if symbol == BATCH else f"a '{symbol}'"
    why = f"the exported program works for {what} of {size} only (dimension {axis} of input '{spec.name}')"
    act = "leave that dimension out of dynamic_shapes(), or write the model without the number"
    message, hint = (f"{why}: {act}", f"{fixed[size]}") if size in fixed else (why, act)
    return Fixed(message, hint=hint, symbol=symbol, size=size)
