"""Bounds of a call on made-up values: a count of 2**40 must end in an error, not in a machine without memory; what a
stage of a capture freed, back to the system before the next one allocates; and what need not be collected, set aside.
"""

import ctypes
import gc
import resource
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType

import torch

MEMORY_BYTES = (2**28, 2**30)
"""Further memory that such a call may take: the first with which the model answers its own values."""
COLLECTED_BYTES = 100_000_000
"""Of weights, for which Python's collector is not waited for: it counts objects, of which a program has few."""
_LIBC = ctypes.CDLL(None)
_SHARE = 32768
"""Bytes of a tensor for each thread that fills it: torch's own grain size (`at::internal::GRAIN_SIZE`)."""


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """An allocation beyond `num_bytes` more than this process has now fails, as torch's and ONNX Runtime's errors say.

    RLIMIT_AS counts mapped memory of the whole process. Where it cannot be read or set, nothing is bounded.
    """
    _start_threads()
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + num_bytes
        if before[0] != resource.RLIM_INFINITY:
            limit = min(limit, before[0])
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    except (OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _start_threads() -> None:
    """Starts the threads that compute operators for this one: libgomp, which has no memory for a thread's stack and
    heap, ends the process."""
    torch.empty(_SHARE * torch.get_num_threads(), dtype=torch.uint8).fill_(0)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether `error` is that of an allocation that failed."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def release_memory(weight_bytes: int = 0) -> None:
    """Returns freed memory to the system, where the C library can (glibc): a few milliseconds for gigabytes. Programs
    with that many bytes of weights are collected first, if these are many: torch's refer to themselves."""
    if weight_bytes > COLLECTED_BYTES:
        gc.collect()
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def set_aside() -> Iterator[None]:
    """In the block, Python's collector looks at what is made in it alone. An export makes objects by the thousand, and
    all are looked at several times, the half million of torch's and the caller's among them: a sixth of a small
    capture."""
    if gc.get_freeze_count():  # the caller's own, or a capture beside this one
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def find_functions(codes: Collection[CodeType]) -> list[FunctionType]:
    """The functions that run one of `codes`, those that were `set_aside` among them: the collector leaves these out of
    what it tells, too."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    try:
        return [one for one in gc.get_referrers(*codes) if isinstance(one, FunctionType)]
    finally:
        if frozen:
            gc.freeze()
