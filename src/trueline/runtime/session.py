"""One interface for every way to run a captured program.

A Session takes and returns named numpy arrays. It checks its inputs against the proven signature (outside its proven
range a program may answer wrongly, without an error; see docs/concepts/proof.md) and is thread-safe. Opening one runs
no code from the bundle. `eager` is the oracle that the others are proven against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

from trueline.bundle.signature import Signature
from trueline.errors import UsageError, closest, join_names

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.generic]

Format = Literal["onnx", "openvino", "offload", "torch_export", "torchscript", "aotinductor"]

FORMATS: tuple[Format, ...] = get_args(Format)
"""In the order in which they are chosen to serve. `openvino` is the ONNX program, proven in OpenVINO; `offload` runs in
torch, with parts in ONNX Runtime."""
USUAL: tuple[Format, ...] = ("onnx", "torch_export")
"""What a capture makes by default: each of them that can be proven."""
STAND_IN: tuple[Format, ...] = ("torchscript",)
"""What it makes where it can prove none of these."""
NATIVE: tuple[Format, ...] = ("aotinductor",)
"""Machine code: opening one runs it. Never chosen to serve."""
TARGETS: dict[str, tuple[Format, ...]] = {
    "onnxruntime": ("onnx",),
    "openvino": ("onnx", "openvino"),
    "offload": ("offload",),
    "torch": ("torch_export",),
    "torchscript": ("torchscript",),
    "cpp": ("torchscript",),
    "aotinductor": ("aotinductor",),
}
"""Where a program is to run -> the formats that run there."""


def formats_for(targets: Iterable[str]) -> tuple[Format, ...]:
    """The formats that run on `targets`, in the order of FORMATS. Raises UsageError.

    >>> formats_for(["cpp", "openvino"])
    ('onnx', 'openvino', 'torchscript')
    """
    wanted: set[Format] = set()
    for target in targets:
        name = target.partition("@")[0]  # `opsets.opset_for` reads the release behind it
        if name not in TARGETS:
            near = closest(name, TARGETS)
            raise UsageError(
                f"there is no target '{name}' (there are: {join_names(TARGETS)})",
                hint=f"did you mean '{near}'?" if near else "",
            )
        wanted.update(TARGETS[name])
    return tuple(format for format in FORMATS if format in wanted)


class Session(Protocol):
    @property
    def format(self) -> str:
        """One of FORMATS, or `eager` or `compile` for the model itself."""
        ...

    @property
    def signature(self) -> Signature: ...

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature."""
        ...


@runtime_checkable
class Bindable(Protocol):
    """A Session whose program can be bound to arrays, for repeated runs of one caller."""

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None] | None:
        """A function that runs from `inputs` into `outputs`; None where only `run` works. It raises the runtime's
        errors; `Session.run` has the messages."""
        ...
