"""Planes: sums of gradients where they lie, beside the gloo group of a generation.

    gloo      what lies in host memory, states, votes: always there; a cut shuts its sockets (`gloo.py`)
    a plane   the buckets of a backward, on their device: NCCL (`nccl.py`), or what a backend of one's own brings

A plane can be aborted at any time, whatever it is doing; what it was summing is undefined from then on, and nothing
says so. So nobody asks a plane whether a sum is good. The group notes a cut before it aborts the plane, and looks at
that note after the plane has said that a sum is over: a sum that was over before the note is whole, any other is thrown
away with its step. See docs/concepts/generation.md, "Planes".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from trueline.errors import UsageError


class Sum(Protocol):
    """A sum that was begun."""

    def over(self) -> bool:
        """True once nothing more will happen to the value: it was summed, or the plane was aborted.

        Does not wait. Raises RuntimeError when the sum has failed by itself.
        """
        ...


class Plane(Protocol):
    """Of one generation. `abort` may come from any thread and more than once, `sum` from one."""

    def sum(self, value: torch.Tensor) -> Sum:
        """Begins the sum of `value` over the members, in place. It must stay where it is until that is over."""
        ...

    def abort(self) -> None:
        """Ends what is under way, here and so for the others; every sum is over soon. Must not wait for a peer."""
        ...


Connect = Callable[[Store, int, int, timedelta], Plane]
"""From a store of the members' own, rank, size and patience to a plane on which all of them are connected.

Raises RuntimeError when they are not by then; TruelineError for what another try will not mend.
"""


def connector(backend: str, device: torch.device) -> Connect | None:
    """How the members of a job over `backend` connect for what lies on `device`; None: they have gloo alone.

    A backend of one's own is `module:function`, and the function is called as `Connect(store, rank, size, patience)`.
    Raises UsageError for a backend that is not there, or that has nothing to do with `device`.
    """
    if backend == "gloo":
        return None
    if backend == "nccl":
        from trueline.parallel import nccl

        return nccl.connector(device)
    module, _, name = backend.partition(":")
    try:
        found: Connect = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"backend is '{backend}', which cannot be imported: {error}",
            hint="say gloo, nccl, or the module:function of a plane that every worker can import",
        ) from error
    return found
