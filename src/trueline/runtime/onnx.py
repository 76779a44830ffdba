"""ONNX programs, run by ONNX Runtime. Opening imports no torch.

ONNX drops an exported program's guards, so the Session enforces the proven range itself. Threads do not spin: that
would take the processor from other requests. Processes that share weights open the graph that the first of them had
rewritten and the weights that it had packed, in a mapped file.

By default each program has an arena of its own, without a bound, which keeps what its largest run has needed: a request
of 8 MB left 5 GB. In a server all share one, which is bounded and shrunk after large runs. A run that needs more fails
and takes nothing: what a program needs may depend on values, which no other bound covers. Weights stay outside.
Sources: `onnxruntime_session_options_config_keys.h`, `onnxruntime_run_options_config_keys.h`, BFCArena.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from trueline import events
from trueline.bundle import external_data
from trueline.bundle.signature import Check, Signature, ValuesCheck
from trueline.errors import BundleError, UsageError, first_line, join_names
from trueline.runtime import shared_weights
from trueline.runtime.refusals import CHECKS, refusal_of
from trueline.runtime.session import DEFAULTS, SessionSettings

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

_ORT_TYPES = {
    "BOOL": "tensor(bool)",
    **{f"INT{bits}": f"tensor(int{bits})" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"tensor(uint{bits})" for bits in (8, 16, 32, 64)},
    "FP16": "tensor(float16)",
    "FP32": "tensor(float)",
    "FP64": "tensor(double)",
}
BAD_INPUT = (state.InvalidArgument, state.RuntimeException)
_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"
_UNLIKELY = 0xA5
"""Fills the outputs before a test run, which has to overwrite it."""
_MADE = "model.onnx"
_TO_SHARE = {
    "session.optimized_model_external_initializers_file_name": "model.onnx.data",
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
    "session.save_external_prepacked_constant_initializers": "1",
}
_AS_REQUESTED = 1
"""Of `arena_extend_strategy`: a region is as large as the request for it; the default doubles them."""
_FIRST_BYTES = 2**20
_SHARED = {"session.use_env_allocators": "1", "session.use_device_allocator_for_initializers": "1"}
_SHRINK = ("memory.enable_memory_arena_shrinkage", "cpu:0")
_IDENTITY = (
    b'\x08\x07:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01b\x0f\n'
    b"\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
"""An ONNX model, y = x: only a run can shrink the arena."""
_LARGE, _KEPT = 1 << 20, 32 << 20
"""Bytes of a block that is mapped alone, and from which on glibc does so by itself in the end."""
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
"""Of `mallopt` (malloc.h)."""
_HAS_THRESHOLD = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
"""Whether the user has chosen one."""
_LIBC = ctypes.CDLL(None)
_opening = 0
_lock = threading.Lock()
_bound_bytes = 0
_shrinker: onnxruntime.InferenceSession | None = None


@final
class OnnxSession:
    """An ONNX program, on the CPU unless `settings` names a CUDA device. Thread-safe."""

    format = "onnx"

    def __init__(self, path: Path, signature: Signature, *, settings: SessionSettings = DEFAULTS) -> None:
        self._session = open_model(path, settings)
        self.signature = signature
        self._check = Check(signature)
        self._names = [spec.name for spec in signature.outputs]
        _check_interface(self._session, signature, path)
        self._checks = json.loads(self._session.get_modelmeta().custom_metadata_map.get(CHECKS, "[]"))

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs that the signature or the program's own checks refuse."""
        self._check(inputs)
        feeds = {name: array if array.flags.c_contiguous else array.copy() for name, array in inputs.items()}
        try:
            found = self._session.run(self._names, feeds)
        except Exception as error:
            raise refusal_of(error, inputs, blame=isinstance(error, BAD_INPUT), checks=self._checks) from error
        return dict(zip(self._names, found, strict=True))

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None] | None:
        """A function that runs the program from `inputs` into `outputs`, one run at a time; None where that fails or a
        test run on the values in `inputs` differs. It raises the runtime's errors, and RequestError for values that the
        signature refuses; `run` has the messages."""
        signature = self.signature
        names = {spec.name for spec in signature.inputs}
        arrays = [*inputs.values(), *outputs.values()]
        if self._session.get_providers() != [_CPU] or signature.random:
            return None  # other devices copy the arrays; random outputs cannot be compared
        if not names.isdisjoint(self._names) or outputs.keys() != set(self._names):
            return None  # an output that is an input keeps the input's memory
        if any(not array.size or not array.flags.c_contiguous for array in arrays):
            return None
        expected = self.run(inputs)
        if any(
            (array.dtype, array.shape) != (outputs[name].dtype, outputs[name].shape) for name, array in expected.items()
        ):
            return None
        binding, session = self._session.io_binding(), self._session
        kept = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays]
        if any(value.data_ptr() != array.ctypes.data for value, array in zip(kept, arrays, strict=True)):
            return None  # a copy of the array, not the array
        for name, value in zip([*inputs, *outputs], kept, strict=True):
            (binding.bind_ortvalue_input if name in inputs else binding.bind_ortvalue_output)(name, value)

        check = ValuesCheck(signature) if signature.is_conditional else None

        def run(_: list[onnxruntime.OrtValue] = kept) -> None:
            if check is not None:
                check(inputs)
            session.run_with_iobinding(binding)

        for array in outputs.values():
            array.reshape(-1).view(np.uint8)[...] = _UNLIKELY
        run()
        same = all(np.array_equal(_bits(array), _bits(outputs[name])) for name, array in expected.items())
        return run if same else None


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def open_model(path: Path, settings: SessionSettings) -> onnxruntime.InferenceSession:
    """The program at `path` as ONNX Runtime opens it. Raises BundleError, and UsageError for a setting it has not."""
    settings.precise("ONNX Runtime", (), otherwise="capture or compress to the precision that it is to compute in")
    providers = _providers(settings)
    external_data.check(path)
    onnxruntime.disable_telemetry_events()
    try:
        with _large_blocks_apart():
            session = _open_shared(path, settings) or onnxruntime.InferenceSession(
                str(path), _options(settings.threads, arena=settings.keeps_memory), providers=providers
            )
    except Exception as error:
        raise BundleError(f"{path} is no ONNX program that this ONNX Runtime can open: {first_line(error)}") from error
    if settings.cuda is not None and _CUDA not in session.get_providers():  # it falls back silently
        raise UsageError(
            f"ONNX Runtime cannot use the device '{settings.device}' and would run on the CPU",
            hint="check the CUDA libraries that this onnxruntime needs, or leave the device out",
        )
    return session


@contextlib.contextmanager
def _large_blocks_apart() -> Iterator[None]:
    """In the block, the system has memory of _LARGE bytes or more back as soon as it is freed (glibc). By default glibc
    keeps freed blocks of up to 32 MB for later ones, which fit where alignment lets them: the weights of convolutions,
    which ONNX Runtime reorders one by one when it opens a program, were in memory twice ever after."""
    global _opening
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is None or _HAS_THRESHOLD:
        yield
        return
    with _lock:
        _opening += 1
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        with _lock:
            _opening -= 1
            if not _opening:  # what glibc raises them to by itself, which it does no longer once one was set
                mallopt(_M_MMAP_THRESHOLD, _KEPT)
                mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT)


def _count_bytes(path: Path, ending: str) -> int:
    """Of the files of a program."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}{ending}"))


_Providers = Sequence[str | tuple[str, dict[str, int]]]


def _open_shared(path: Path, settings: SessionSettings) -> onnxruntime.InferenceSession | None:
    """The program with shared weights; None if it is not to share, is too small, is mostly tables, or cannot (with an
    event)."""
    num_bytes, in_tables = (_count_bytes(path, ending) for ending in ("*", ".*.safetensors"))
    if settings.place is None or settings.cuda is not None or num_bytes < shared_weights.WORTH_BYTES:
        return None
    if 2 * in_tables >= num_bytes:  # processes have them once as they are: mapped from the bundle, and not packed
        return None

    def make(folder: Path) -> None:
        options = _options(1)
        options.optimized_model_filepath = str(folder / _MADE)
        for key, value in _TO_SHARE.items():
            options.add_session_config_entry(key, value)
        onnxruntime.InferenceSession(str(path), options, providers=[_CPU])

    place = settings.place.part(f"onnxruntime-{onnxruntime.__version__}")
    options = _options(settings.threads)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimized already
    with contextlib.ExitStack() as failing:
        try:
            hold = shared_weights.hold(place, make, program_bytes=num_bytes)
            failing.callback(hold.release)
            session = onnxruntime.InferenceSession(str(hold.path / _MADE), options, providers=[_CPU])
        except Exception as error:  # noqa: BLE001 - whatever it is, the program itself is still to be opened
            events.emit("weights.private", why=first_line(error))
            return None
        failing.pop_all()
    weakref.finalize(session, hold.release).atexit = False
    return session


def _providers(settings: SessionSettings) -> _Providers:
    if settings.device in ("", "cpu"):
        return [_CPU]
    has = onnxruntime.get_available_providers()
    if settings.cuda is None:
        raise UsageError(f"ONNX Runtime runs on cpu or cuda[:n] here, not on '{settings.device}'")
    if _CUDA not in has:
        raise UsageError(
            f"this ONNX Runtime has nothing for the device '{settings.device}' (has: {join_names(has)})",
            hint="install onnxruntime-gpu, or leave the device out to run on the CPU",
        )
    return [(_CUDA, {"device_id": settings.cuda}), _CPU]


def _options(threads: int, *, arena: bool = True) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if arena:
        _share(options)
    else:
        options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def _check_interface(session: onnxruntime.InferenceSession, signature: Signature, path: Path) -> None:
    for role, found, wanted in (
        ("inputs", session.get_inputs(), signature.inputs),
        ("outputs", session.get_outputs(), signature.outputs),
    ):
        has = {node.name: node.type for node in found}
        expected = {spec.name: _ORT_TYPES[spec.datatype] for spec in wanted}
        if has != expected:
            raise BundleError(f"{path} has {role} {has}, its signature says {expected}")


def limit_memory(num_bytes: int) -> None:
    """Programs that are opened from now on share one arena of at most `num_bytes`. The first call counts."""
    global _bound_bytes, _shrinker
    with _lock:
        if _bound_bytes:
            return
        where = state.OrtMemoryInfo(
            "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, state.OrtMemType.DEFAULT
        )
        settings = {
            "max_mem": num_bytes,
            "arena_extend_strategy": _AS_REQUESTED,
            "initial_chunk_size_bytes": _FIRST_BYTES,
            "max_dead_bytes_per_chunk": -1,
        }
        onnxruntime.create_and_register_allocator(where, onnxruntime.OrtArenaCfg(settings))
        _bound_bytes = num_bytes
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        _share(options)
        _shrinker = onnxruntime.InferenceSession(_IDENTITY, options, providers=[_CPU])


def _share(options: onnxruntime.SessionOptions) -> None:
    """A session with `options` uses the shared arena, if there is one."""
    if _bound_bytes:
        for key, value in _SHARED.items():
            options.add_session_config_entry(key, value)


def shrink_memory() -> None:
    """Returns the unused memory of the shared arena, if there is one. Blocks for about 0.2 ms per megabyte."""
    if _shrinker is None:
        return
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(*_SHRINK)
    _shrinker.run(["y"], {"x": np.zeros(1, np.float32)}, options)
