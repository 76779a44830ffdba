"""torch's attention reads beyond its values where they are fewer than its keys.

`scaled_dot_product_attention` on a processor checks neither length against the other (torch 2.13): memory that is
another's decides the answer, or ends the process with SIGSEGV. What no size of an example shows, a probe's does.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
"""The only way that attention takes without a product of matrices, which would compare the lengths."""
_lock = threading.Lock()
_users = 0
_library: Any = None


@contextmanager
def check_attention() -> Iterator[None]:
    """In the block, attention raises ValueError for keys and values of different lengths, in all threads.

    The kernel itself is replaced: under a mode of Python functions torch and the exporter take other ways than without,
    and numbers that a model takes out of tensors would be seen on another line.
    """
    global _users, _library
    with _lock:
        _users += 1
        if _users == 1:
            original = _find_kernel()
            _library = _replace_kernel(functools.partial(_check, original))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _library._destroy()


@functools.cache
def _find_kernel() -> Any:
    """torch's own, before it is replaced."""
    original = torch.library.get_kernel(f"aten::{_KERNEL}", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the first kernel of a process that is replaced
        _replace_kernel(functools.partial(_check, original))._destroy()
    return original


def _replace_kernel(kernel: Callable[..., Any]) -> Any:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(_KERNEL, kernel, "CPU", with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def _check(original: Any, keyset: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    keys, values = key.shape[-2], value.shape[-2]
    if keys != values:
        raise ValueError(f"attention has {keys} keys and {values} values: each key needs one value")
    return original.call_boxed(keyset, query, key, value, *args, **kwargs)
