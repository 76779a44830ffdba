"""Planes: sums of a backward's buckets on their devices, by NCCL or a user's own backend.

The gloo group of a generation (`gloo.py`) is always there beside it: for host memory, state transfer and votes. An
aborted plane's pending sums are undefined and still report success, so the group marks itself cut before it aborts
the plane and checks that mark after a sum is over (docs/concepts/generation.md, "Planes").
"""

import functools
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trueline.errors import TrainError, UsageError

_QUIET_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
}
"""Switches off what would end a survivor's process or block it; read when a group is created."""
_LOOK_S = 0.001
_SUM_TIMEOUT = timedelta(hours=24)
"""NCCL's own, out of reach: the view decides how long to wait for a peer."""


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
    Raises UsageError for a backend that cannot be imported, or that this torch or `device` does not support.
    """
    if backend == "gloo":
        return None
    if backend == "nccl":
        if not dist.is_nccl_available():
            raise UsageError(
                f"backend is 'nccl', and torch {torch.__version__} was built without it",
                hint="install a torch that is built for CUDA, or leave --backend out: gradients go over gloo then",
            )
        if device.type != "cuda":
            raise UsageError(
                f"backend is 'nccl', and this worker computes on the {device.type}",
                hint="say --device cuda, or leave --backend out: gradients go over gloo then",
            )
        return functools.partial(NcclPlane, device=device)
    module, _, name = backend.partition(":")
    try:
        connect: Connect = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"backend is '{backend}', which cannot be imported: {error}",
            hint="say gloo, nccl, or the module:function of a plane that every worker can import",
        ) from error
    return connect


class NcclSum:
    """The sum of a bucket. The operation keeps the bucket's memory until it is over."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def over(self) -> bool:
        if not self._work.is_completed():
            return False
        error = self._work.exception()
        if error is not None:
            raise dist.DistBackendError(f"nccl: {error}")
        self._work.wait()  # does not block any more: it orders the stream and releases what the work kept
        return True


class NcclPlane:
    """NCCL's communicators of one generation. Raises RuntimeError when members do not connect within `patience`.

    torch's ProcessGroupNCCL is created outside torch.distributed's registry, so that its communicators live as long as
    a generation. Pitfalls (ProcessGroupNCCL.hpp; pytorch issues 111646 and 115388): its watchdog must not end the
    process when a peer dies; creating a communicator waits without a limit, unless it is non-blocking; only an abort
    ends a sum whose peer is dead, and leaves that sum's memory undefined; `Work.wait` makes the stream wait and not
    this thread, so sums are polled. Needs a torch built for CUDA, and a device for each worker.
    """

    def __init__(self, store: Store, rank: int, size: int, patience: timedelta, *, device: torch.device) -> None:
        self._device = device
        _check_own_device(store, rank, size, patience, device)
        for name, value in _QUIET_NCCL.items():
            os.environ.setdefault(name, value)
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = _SUM_TIMEOUT
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._aborted = threading.Lock()
        try:
            self._connect(time.monotonic() + patience.total_seconds())
        except BaseException:
            self.abort()
            raise

    def _connect(self, deadline: float) -> None:
        """Runs a first sum, for which NCCL creates the communicators."""
        first = self.sum(torch.ones(1, device=self._device))
        while not first.over():
            if time.monotonic() > deadline:
                raise RuntimeError("nccl: the members did not come together in time")
            time.sleep(_LOOK_S)

    def sum(self, value: torch.Tensor) -> NcclSum:
        with torch.cuda.device(self._device):
            return NcclSum(self._group.allreduce([value]))

    def abort(self) -> None:
        if self._aborted.acquire(blocking=False):  # never released: a second abort would use freed memory
            self._group.abort()


def _check_own_device(store: Store, rank: int, size: int, patience: timedelta, device: torch.device) -> None:
    """Raises TrainError when two members share a device, which NCCL does not support."""
    mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"device-{rank}", mine)
    names = [f"device-{other}" for other in range(size)]
    store.wait(names, patience)
    others = [other for other, name in enumerate(names) if other != rank and store.get(name).decode() == mine]
    if others:
        raise TrainError(
            f"backend is 'nccl', and workers {min(rank, *others)} and {max(rank, *others)} share {device}",
            hint="ask for as many workers as there are devices, or leave --backend out: gradients go over gloo then",
        )
