"""Named arrays to the tensors of a torch program and back, its device, autocast, and a check that torch lacks."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trueline.bundle.signature import Signature
from trueline.errors import UsageError, first_line
from trueline.runtime.session import SessionSettings

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("fp32", *AUTOCAST)
_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")
_libraries: list[Any] = []
"""Kernels of this module, which are in use as long as these live."""


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


def to_arrays(
    signature: Signature, found: tuple[torch.Tensor, ...], *, cast: bool = False, kept: Collection[int] | None = None
) -> dict[str, Array]:
    """Names the outputs. They are copied: a module may later write into a buffer that it returned. Of a program that
    keeps nothing but the storages at the addresses `kept`, an output that fills a storage of its own is not. `cast`
    converts outputs of autocast back to the signature's dtypes."""
    named = zip(signature.outputs, found, strict=True)
    if cast:  # numpy has no bfloat16
        plain = ((spec, tensor.double() if tensor.is_floating_point() else tensor) for spec, tensor in named)
        return {spec.name: to_array(tensor).astype(spec.dtype) for spec, tensor in plain}
    taken = None if kept is None else {*kept}
    return {spec.name: _hand_out(tensor, taken) for spec, tensor in named}


def _hand_out(tensor: torch.Tensor, taken: set[int] | None) -> Array:
    """Notes the storage of an output that is not copied in `taken`; None: all are."""
    array = to_array(tensor)
    if taken is None or tensor.layout is not torch.strided:
        return array.copy()
    storage = tensor.untyped_storage()
    if storage.data_ptr() in taken or storage.nbytes() != tensor.nbytes or not tensor.is_contiguous():
        return array.copy()
    taken.add(storage.data_ptr())
    return array


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


@functools.cache
def check_offsets() -> None:
    """From now on bags of rows raise ValueError for offsets that fall, in all threads of this process.

    torch compares the first and the last offset with the ids and no offset with the next (torch 2.13): of `[0, 4, 2]`
    it adds what lies in memory, and a large negative one ends the process with SIGSEGV. A model that sums counts to
    offsets gets such ones from a client's negative count. The kernel itself is replaced: under a mode of Python
    functions torch and the exporters take other ways than without.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the first kernel of a process that is replaced
        for name in _BAGS:
            original = torch.library.get_kernel(f"aten::{name}", "CPU")
            library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            check = functools.partial(_compare_offsets, original)
            library.impl(name, check, "CPU", with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
            _libraries.append(library)


def _compare_offsets(
    original: Any, keyset: Any, weight: Any, indices: Any, offsets: Any, *args: Any, **kwargs: Any
) -> Any:
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if falls.numel():
        at = int(falls[0])
        one, other = offsets[at : at + 2].tolist()
        raise ValueError(f"offsets of bags have to grow: bag {at} begins at {one}, and the next at {other}")
    return original.call_boxed(keyset, weight, indices, offsets, *args, **kwargs)
