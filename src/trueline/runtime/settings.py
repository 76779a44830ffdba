"""How a Session is to run: threads, device, precision. A setting that a runtime does not know is refused.

Each runtime says what it knows; nothing is ignored, because a server that was told `bf16` and computes in fp32, or was
told a GPU and computes beside it, is slow or wrong without a word. Imports no torch.
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
    """What the caller asks for; 0 and "" leave it to the runtime."""

    threads: int = 0
    """For the operators of one run."""
    device: str = ""
    """`cpu`, `cuda`, `cuda:1`, or a name that the runtime has for its devices."""
    precision: str = ""
    """`fp32`, `bf16` or `fp16`: in what the program computes. What goes in and comes out keeps its dtype."""
    place: SharedDir | None = None
    """Where processes that run this program lay what they share of it; None: each has a copy of its own. A runtime that
    cannot share has its own copy, too."""

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise UsageError(f"threads is {self.threads}; expected 0 (the runtime chooses) or more")

    def precise(self, runtime: str, known: Sequence[str], *, otherwise: str) -> str:
        """The precision if `runtime` knows it. Raises UsageError that says what else to do."""
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
        """The number of the CUDA device that is asked for; None when it is another device."""
        found = _CUDA.fullmatch(self.device)
        return None if found is None else int(found[2] or 0)


DEFAULTS = SessionSettings()
