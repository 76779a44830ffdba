"""Named arrays to the tensors of a torch program and back, its device, and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from trueline.bundle.signature import Signature
from trueline.errors import UsageError, first_line
from trueline.runtime.session import SessionSettings

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("fp32", *AUTOCAST)


def to_tensors(
    signature: Signature, inputs: Mapping[str, Array], device: torch.device | None = None
) -> tuple[torch.Tensor, ...]:
    """Copies `inputs` into tensors in the signature's order, on `device`."""
    made = (torch.from_numpy(np.array(inputs[spec.name], order="C")) for spec in signature.inputs)
    return tuple(made if device is None else (tensor.to(device) for tensor in made))


def to_array(tensor: torch.Tensor) -> Array:
    """The numbers of `tensor`, in its own memory where they lie there as they are: `z.conj().imag` is a view of others,
    whose signs are changed when it is read, and numpy has no such array."""
    found: Array = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    return found


def to_arrays(signature: Signature, found: tuple[torch.Tensor, ...], *, cast: bool = False) -> dict[str, Array]:
    """Names the outputs. They are copied: a module may later write into a buffer that it returned. `cast` converts
    outputs of autocast back to the signature's dtypes."""
    named = zip(signature.outputs, found, strict=True)
    if cast:  # numpy has no bfloat16
        plain = ((spec, tensor.double() if tensor.is_floating_point() else tensor) for spec, tensor in named)
        return {spec.name: to_array(tensor).astype(spec.dtype) for spec, tensor in plain}
    return {spec.name: to_array(tensor).copy() for spec, tensor in named}


def casts(settings: SessionSettings) -> bool:
    """Whether outputs have another dtype than the program's own."""
    return settings.precision in AUTOCAST


def device(settings: SessionSettings) -> torch.device:
    """The device of `settings`; sets its threads for the whole process. Raises UsageError for one that is not here."""
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


def autocast(settings: SessionSettings, where: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context of a call: torch's autocast for bf16 and fp16. Raises UsageError for another precision."""
    found = settings.precise("torch", PRECISIONS, otherwise="fp32 is what was proven; bf16 and fp16 are autocast")
    return torch.autocast(where.type, AUTOCAST[found]) if found in AUTOCAST else contextlib.nullcontext()


def one_line(error: Exception) -> str:
    """The type of `error` and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__


@contextlib.contextmanager
def restored_vmap_levels() -> Iterator[None]:
    """Closes the levels of `torch.vmap` that the block has opened in this thread and left open.

    An exported program enters and leaves them by calls of its graph. If a call between them raises, the level stays
    open: every later draw of random numbers in the thread is refused, and what runs there may answer wrongly. Seen with
    torch 2.13; torch._dynamo restores the levels around what it compiles (`eval_frame.py`), nothing else does.
    """
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
