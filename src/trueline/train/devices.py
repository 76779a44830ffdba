"""The device of a worker: the CPU, or a CUDA device of its machine.

Workers exchange data through host memory, so a job may have both kinds.
"""

import functools
import os
from typing import Any

import torch

from trueline.data.loading.worker_pool import ReaderLost
from trueline.data.source import Batch
from trueline.engine.contract import parse_ref
from trueline.errors import UsageError
from trueline.train.settings import device_kind


def choose(setting: str, slot: int) -> torch.device:
    """The device of worker `slot`: with `cuda` and `auto` the workers take the machine's devices in turn.

    Call it in the worker: a process that has used CUDA cannot be forked. Raises UsageError for a device that this
    machine does not have; `auto` falls back to the CPU.
    """
    kind, number = device_kind(setting)
    count = torch.cuda.device_count() if kind != "cpu" and torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return torch.device("cpu")
    index = slot % max(count, 1) if number is None else number
    if index >= count:
        present = f"{count} CUDA device{'' if count == 1 else 's'}" if count else "no CUDA device"
        raise UsageError(
            f"device is '{setting}', and torch {torch.__version__} finds {present} here",
            hint="say cpu or auto; nvidia-smi shows what there is, and torch has to be built for CUDA",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def choose_own(setting: str, *, repeatable: bool = False) -> torch.device:
    """The device of this worker (outside a job: worker 0). `repeatable`: with deterministic CUDA algorithms."""
    if repeatable:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA is first used
    device = choose(setting, parse_ref(os.environ.get("TRUELINE_REF") or "worker-0.0")[1])
    if repeatable and device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    return device


def is_lost(error: BaseException) -> bool:
    """Whether the device or a reader is lost to this process, so that everything it does next fails too."""
    return isinstance(error, torch.AcceleratorError | ReaderLost)


def of_model(model: torch.nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next((value.device for value in model.parameters()), torch.device("cpu"))


def place(value: Any, device: torch.device) -> Any:
    """`value` with its nested tensors on `device`; through pinned memory to CUDA, beside its computation."""
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        pinned = value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
        return pinned.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)):  # a PackedSequence, a tokenizer's BatchEncoding
        return value.to(device)
    if isinstance(value, dict):
        return {key: place(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(place(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(place(item, device) for item in value)
    return value


def place_batch(batch: Batch, device: torch.device) -> Batch:
    """Inputs and labels on `device`; the batch itself when that is the CPU."""
    if device.type == "cpu":
        return batch
    return Batch(place(batch.inputs, device), place(batch.labels, device))


def wrap_for_host(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Moves `model` to `device`; it still takes and returns tensors in host memory."""
    if device.type == "cpu":
        return model
    inside, host = model.to(device).forward, torch.device("cpu")

    @functools.wraps(inside)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return place(inside(*place(args, device), **place(kwargs, device)), host)

    model.forward = forward
    return model
