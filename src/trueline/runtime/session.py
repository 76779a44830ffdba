"""One interface for every way to run a captured program, and its settings. Imports no torch.

A Session checks its inputs against the proven signature (outside its range a program may answer wrongly without an
error; see docs/concepts/proof.md) and is thread-safe. Opening one runs no code from the bundle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

from trueline.bundle.signature import Signature
from trueline.errors import UsageError, closest, join_names
from trueline.runtime.shared_weights import SharedDir

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
HAS_FIXED: tuple[Format, ...] = ("openvino",)
"""Whose runtimes may compile a program a second time, for the sizes of one request alone."""
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


@runtime_checkable
class HoldsMemory(Protocol):
    """A Session that keeps memory of its largest run which only it can give back."""

    def release_memory(self) -> None:
        """Gives back what no run needs now; the next run may take longer."""
        ...


_CUDA = re.compile(r"cuda(:(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How a Session runs; 0 and "" leave a setting to the runtime.

    A runtime refuses a setting that it does not have and ignores none: a server that silently computes in fp32 instead
    of bf16, or on the CPU instead of the GPU, is slow or wrong without an error.
    """

    threads: int = 0
    """For the operators of one run."""
    device: str = ""
    """`cpu`, `cuda`, `cuda:1`, or a name that the runtime has for its devices."""
    precision: str = ""
    """`fp32`, `bf16` or `fp16`: in what the program computes. Inputs and outputs keep their dtypes."""
    place: SharedDir | None = None
    """Where the processes that run this program share its weights; None: each has its own copy, as in runtimes that
    cannot share."""
    keeps_memory: bool = True
    """What a run has needed stays for the next one. False: the system has it back, for runs of many sizes."""

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise UsageError(f"threads is {self.threads}; expected 0 (the runtime chooses) or more")

    def precise(self, runtime: str, known: Sequence[str], *, otherwise: str) -> str:
        """The precision if `runtime` has it. Raises UsageError with `otherwise` as the hint."""
        if self.precision and self.precision not in known:
            has = f"knows: {join_names(known)}" if known else "knows none: it computes as the program says"
            raise UsageError(f"{runtime} has no precision '{self.precision}' ({has})", hint=otherwise)
        return self.precision

    def on_cpu(self, runtime: str) -> None:
        """Raises UsageError for a device other than the CPU."""
        if self.device not in ("", "cpu"):
            raise UsageError(
                f"{runtime} runs on the CPU, not on the device '{self.device}'",
                hint="leave the device out, or open another program of the bundle",
            )

    @property
    def cuda(self) -> int | None:
        """The number of the CUDA device; None for another device."""
        match = _CUDA.fullmatch(self.device)
        return None if match is None else int(match[2] or 0)


DEFAULTS = SessionSettings()
