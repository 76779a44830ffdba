"""Planes: sums of a backward's buckets on their devices, by NCCL (`nccl.py`) or a user's own backend.

The gloo group of a generation (`gloo.py`) is always there beside it: for host memory, state transfer and votes. An
aborted plane's pending sums are undefined and still report success, so the group marks itself cut before it aborts
the plane and checks that mark after a sum is over (docs/concepts/generation.md, "Planes").
"""

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from trueline.errors import UsageError


class Sum(Protocol):
    """A pending sum."""

    def over(self) -> bool:
        """Whether the value is final: summed, or undefined after an abort. Raises RuntimeError if the sum failed."""


class Plane(Protocol):
    """Lives as long as a generation. `abort` is called from any thread and may be repeated, `sum` from one thread."""

    def sum(self, value: torch.Tensor) -> Sum:
        """Begins the sum of `value` over the members, in place. Its memory must stay valid until the sum is over."""

    def abort(self) -> None:
        """Ends all pending sums, here and so for the peers. Must not wait for a peer."""


Connect = Callable[[Store, int, int, timedelta], Plane]
"""Called as `Connect(store, rank, size, patience)`; returns a plane that connects all members.

Raises RuntimeError when they are not connected in time; TruelineError if another attempt would fail as well.
"""


def connector(backend: str, device: torch.device) -> Connect | None:
    """How members connect over `backend` for tensors on `device`; None: gloo alone.

    A user's own backend is `module:function`, where the function is a `Connect`.
    Raises UsageError for a backend that cannot be imported or does not support `device`.
    """
    if backend == "gloo":
        return None
    if backend == "nccl":
        from trueline.parallel import nccl

        return nccl.connector(device)
    module, _, name = backend.partition(":")
    try:
        connect: Connect = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"backend is '{backend}', which cannot be imported: {error}",
            hint="say gloo, nccl, or the module:function of a plane that every worker can import",
        ) from error
    return connect
