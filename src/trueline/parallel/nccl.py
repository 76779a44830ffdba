"""NCCL as the plane of a generation: gradients are summed on their devices, and never pass through the host.

torch's ProcessGroupNCCL is made by hand, outside torch.distributed's registry: its communicators live as long as a
generation. What is minded (source: ProcessGroupNCCL.hpp; pytorch issues 111646 and 115388):

* its watchdog must not end the process when a peer is gone: the view says what to do then;
* a communicator that is being made waits for peers for ever unless it is made without blocking;
* an abort is the only way out of a sum whose peer is gone, and may leave anything in the memory of that sum;
* `Work.wait` makes the stream wait and not this thread, so whether a sum is over is asked until it is.

Needs a torch that was built for CUDA, and a device for each worker.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trueline.errors import TrainError, UsageError

_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
}
"""What would end the process of a survivor, or keep it waiting; read when a group is made."""
_LOOK_S = 0.001
_SUM_TIMEOUT = timedelta(hours=24)
"""NCCL's own: the view decides when a peer has been waited for long enough."""


def connector(device: torch.device) -> Callable[[Store, int, int, timedelta], NcclPlane]:
    """Raises UsageError when NCCL is not in this torch, or `device` is none of its."""
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


class NcclPlane:
    """Communicators of one generation. Raises RuntimeError when its members do not come together in `patience`."""

    def __init__(self, store: Store, rank: int, size: int, patience: timedelta, *, device: torch.device) -> None:
        self._device = device
        _check_own_device(store, rank, size, patience, device)
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = _SUM_TIMEOUT
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._aborted = threading.Lock()
        try:
            self._greet(time.monotonic() + patience.total_seconds())
        except BaseException:
            self.abort()
            raise

    def _greet(self, deadline: float) -> None:
        """A first sum, for which communicators are made: who has it is connected with everybody."""
        greeting = self.sum(torch.ones(1, device=self._device))
        while not greeting.over():
            if time.monotonic() > deadline:
                raise RuntimeError("nccl: the members did not come together in time")
            time.sleep(_LOOK_S)

    def sum(self, value: torch.Tensor) -> NcclSum:
        with torch.cuda.device(self._device):
            return NcclSum(self._group.allreduce([value]))

    def abort(self) -> None:
        if self._aborted.acquire(blocking=False):  # kept: a second abort would meet what the first has freed
            self._group.abort()


class NcclSum:
    """One bucket's. The operation keeps the bucket's memory until it is over."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def over(self) -> bool:
        if not self._work.is_completed():
            return False
        found = self._work.exception()
        if found is not None:
            raise dist.DistBackendError(f"nccl: {found}")
        self._work.wait()  # the stream's order, and what is kept for it; nothing is left to wait for
        return True


def _check_own_device(store: Store, rank: int, size: int, patience: timedelta, device: torch.device) -> None:
    """NCCL has one member for each device. Raises TrainError when two have the same."""
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
