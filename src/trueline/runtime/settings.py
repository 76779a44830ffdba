"""How a Session runs: threads, device, precision. Imports no torch.

A runtime refuses a setting that it does not have and ignores none: a server that silently computes in fp32 instead of
bf16, or on the CPU instead of the GPU, is slow or wrong without an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trueline.errors import UsageError, join_names
from trueline.runtime.shared_weights import SharedDir

_CUDA = re.compile(r"cuda(:(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """0 and "" leave a setting to the runtime."""

    threads: int = 0
    """For the operators of one run."""
    device: str = ""
    """`cpu`, `cuda`, `cuda:1`, or a name that the runtime has for its devices."""
    precision: str = ""
    """`fp32`, `bf16` or `fp16`: in what the program computes. Inputs and outputs keep their dtypes."""
    place: SharedDir | None = None
    """Where the processes that run this program share its weights; None: each has its own copy, as in runtimes that
    cannot share."""

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
                f"{runtime} runs on the CPU, and was asked for the device '{self.device}'",
                hint="leave the device out, or open another program of the bundle",
            )

    @property
    def cuda(self) -> int | None:
        """The number of the CUDA device; None for another device."""
        match = _CUDA.fullmatch(self.device)
        return None if match is None else int(match[2] or 0)


DEFAULTS = SessionSettings()
