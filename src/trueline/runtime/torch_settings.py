"""Settings for what torch runs: devices and autocast. See `settings`."""

from __future__ import annotations

import contextlib

import torch

from trueline.errors import UsageError
from trueline.runtime.settings import Settings

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("fp32", *AUTOCAST)


def casts(settings: Settings) -> bool:
    """Whether outputs come in another dtype than the program's own."""
    return settings.precision in AUTOCAST


def device(settings: Settings) -> torch.device:
    """The device that is asked for; threads are set for the whole process. Raises UsageError when it is not here."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.device in ("", "cpu"):
        return torch.device("cpu")
    number, count = settings.cuda, torch.cuda.device_count()
    if number is None:
        raise UsageError(f"torch programs run on cpu or cuda[:n] here, not on '{settings.device}'")
    if number >= count:
        raise UsageError(
            f"there is no device '{settings.device}' here (torch {torch.__version__} sees {count} CUDA devices)",
            hint="leave the device out to run on the CPU",
        )
    return torch.device("cuda", number)


def autocast(settings: Settings, where: torch.device) -> contextlib.AbstractContextManager[object]:
    """What a call is made under: torch's autocast for bf16 and fp16. Raises UsageError for another precision."""
    found = settings.precise("torch", PRECISIONS, otherwise="fp32 is what was proven; bf16 and fp16 are autocast")
    return torch.autocast(where.type, AUTOCAST[found]) if found in AUTOCAST else contextlib.nullcontext()
