"""The state that a model keeps in plain Python, wherever it is: see `reach.py`.

A table that is made when a size first comes does no harm. A number that is taken from the first input does: with inputs
in another order the model answers differently. To call it in another order, what it kept before its first call is put
back, container by container, so that what two parts share they share again.
"""

import array
import copy
import functools
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, CellType, FunctionType, GeneratorType, MethodWrapperType, ModuleType
from typing import Any, final

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from trueline.capture.model import code_paths, opaque
from trueline.capture.model.reach import (
    DEFAULTS,
    MISSING,
    WIDTH,
    KeptValue,
    attributes,
    elements_of,
    items_of,
    owner_of,
)
from trueline.capture.model.streams import copy_iterator, find_inside, find_position, is_iterator

_LARGEST = 64 << 20
"""Bytes of a tensor above which it is not copied, only looked at."""
_READ = 1 << 18
"""Bytes of a larger one that are read, all over it, to see whether it changed."""
_WRITTEN_OUT = frozenset({"datetime", "decimal", "fractions", "pathlib", "uuid", "builtins", "ipaddress", "zoneinfo"})
"""Modules of types whose repr is their value."""


def take_snapshot(module: torch.nn.Module) -> dict[str, object]:
    """A trace of each value that is reached from `module`, by its path.

    >>> module = torch.nn.Module()
    >>> module.seen = [1]
    >>> before = take_snapshot(module)
    >>> module.seen.append(2)
    >>> find_changed(before, take_snapshot(module))
    ('seen',)
    """
    traces: dict[str, object] = {}
    for kept in attributes(module):
        traces.setdefault(kept.path, trace(kept.value))
    return traces


def find_changed(before: dict[str, object], after: dict[str, object]) -> tuple[str, ...]:
    """The paths whose values differ; of what is inside a collection, the collection's."""
    names = {path: None for path, one in after.items() if before.get(path, MISSING) != one}
    names |= {path: None for path in before if path not in after}
    return tuple(dict.fromkeys(path.partition("[")[0] for path in names))


def trace(value: Any) -> object:
    """Differs after `value` was written to; of a collection its size alone."""
    if isinstance(value, bool | int | str | bytes | complex | None):
        return type(value).__name__, value
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, torch.Tensor):
        return _trace_tensor(value)
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, _checksum(value)
    if isinstance(value, dict):
        return type(value).__name__, _trace_keys(value)
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, len(elements_of(value))
    if isinstance(value, set | frozenset):
        elements = elements_of(value)
        return len(elements), frozenset(map(trace, elements)) if len(elements) <= _READ >> 8 else None
    if isinstance(value, bytearray | array.array):
        return bytes(value)
    if isinstance(value, np.generic):
        return value.dtype.str, value.tobytes()
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    found = state_of(value) or opaque.read_state(value)
    return _trace_object(value) if found is None else (type(value).__name__, found)


def _trace_object(value: Any) -> object:
    if isinstance(value, FunctionType):
        return value.__qualname__, id(value.__code__)
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        kept = {} if frame is None else frame.f_locals
        return (
            "generator",
            -1 if frame is None else frame.f_lasti,
            [trace(one) for one in kept.values()],
            [*find_inside(value)],
        )
    if isinstance(value, functools._lru_cache_wrapper):
        return "cache", value.cache_info().currsize if _is_own(value) else 0
    if is_iterator(value):
        return type(value).__name__, find_position(value)
    if isinstance(value, BuiltinFunctionType | MethodWrapperType) and owner_of(value) is not None:
        asked = value() if value.__name__ == "cache_info" else None
        return value.__name__, asked, trace(owner_of(value))  # `itertools.count().__next__`
    if isinstance(value, BuiltinFunctionType | type):
        return id(value)
    kind = type(value)
    return kind.__qualname__, repr(value) if kind.__module__ in _WRITTEN_OUT else ""


def _trace_tensor(value: torch.Tensor) -> object:
    if is_lazy(value):
        return "lazy", id(value)  # it has no shape before the first call
    form = tuple(value.shape), value.dtype, value.layout
    if isinstance(value, torch.nn.Parameter) or value.layout is not torch.strided or value.device.type != "cpu":
        return form, id(value), value._version
    try:
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, ValueError):
        return form, id(value), value._version  # a subclass, quantized numbers, a fake tensor
    return (
        form,
        zlib.crc32(flat.data if value.nbytes <= _LARGEST else _some(flat).tobytes()),
        (value._version if value.nbytes > _READ else 0),
    )


def _checksum(value: np.ndarray[Any, Any]) -> int:
    """Of all that can be written: nothing else tells that one number of many was."""
    whole = value.flags.writeable and value.nbytes <= _LARGEST and value.dtype != object
    return zlib.crc32(np.ascontiguousarray(value).data if whole else _some(value.reshape(-1)).tobytes())


def _trace_keys(value: dict[Any, Any]) -> object:
    """How many keys it has, and in which order where they are plain: one that is moved to the end shows."""
    keys = [key for key, _ in items_of(value)]
    plain = len(keys) <= WIDTH and all(type(key) in (int, str) for key in keys)
    return len(keys), hash(tuple(keys)) if plain else None


def _some(flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    step = max(flat.nbytes // _READ, 1)
    return flat[::step] if step > 1 else flat


def state_of(value: Any) -> tuple[object, ...] | None:
    """The state of a generator of random numbers, in a form that can be compared; None for anything else."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else ("random", value.getstate())
    if isinstance(value, np.random.Generator):
        return ("numpy", repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        kind, keys, *rest = value.get_state(legacy=True)
        return (kind, np.asarray(keys).tobytes(), *rest)
    if isinstance(value, torch.Generator):
        return ("torch", value.get_state().numpy().tobytes())
    if isinstance(value, np.random.BitGenerator):
        return ("bits", repr(value.state))
    return None


@final
class Memento:
    """What everything that is reached from `module` held when this was made. Containers are kept by what is in them,
    tensors that are no parameters by their numbers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.traces: dict[str, object] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._values: list[tuple[Any, Any]] = []
        self._single: list[KeptValue] = []
        self._opaque: list[tuple[Any, object]] = []
        self._iterators: dict[int, tuple[Any, Any]] = {}
        self._keep_fields(module)
        for kept in attributes(module):
            self.traces.setdefault(kept.path, trace(kept.value))
            self._keep(kept)
        for part in module.modules():  # a flag that says that hooks are there is put back together with them
            for name, held in vars(part).items():
                if name.endswith("_hooks") and isinstance(held, dict):
                    self._containers.setdefault(id(held), (held, dict(held)))

    def _keep(self, kept: KeptValue) -> None:
        file = kept.kind == "dict" and "__builtins__" in kept.holder  # which has more names than those that are used
        if file or kept.kind in ("attribute", "cell", "context", "partial"):
            self._single.append(kept)
        elif kept.kind == "dict":
            if id(kept.holder) not in self._containers:
                self._containers[id(kept.holder)] = kept.holder, dict(items_of(kept.holder))
        elif kept.kind == "element" and kept.holder.name == DEFAULTS:
            self._single.append(kept.holder)
        value = kept.value
        self._keep_fields(value)
        if isinstance(value, dict | list | set | deque | bytearray) and id(value) not in self._containers:
            self._containers[id(value)] = value, _shallow(value)
        elif is_iterator(value) and id(value) not in self._iterators:
            self._iterators[id(value)] = value, copy_iterator(value)
        elif isinstance(value, torch.Tensor | np.ndarray) or state_of(value) is not None:
            self._values.append((value, _copy_value(value)))
        elif (held := opaque.read_state(value)) is not None:
            self._opaque.append((value, held))

    def _keep_fields(self, value: Any) -> None:
        """Keeps which attributes an object has, also where it has none yet."""
        held = None if isinstance(value, type | ModuleType) else getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._containers.setdefault(id(held), (held, dict(held)))

    def restore(self) -> None:
        """Puts back what was there. An iterator is replaced by a copy of what it was, where it has a place of its
        own."""
        for holder, content in self._containers.values():
            _refill(holder, self._renew_inside(content))
        for kept in self._single:
            now = self._renew(kept.value)
            if isinstance(kept.holder, CellType) or kept.kind == "context" or not _holds(kept, now):
                kept.assign(now)
        for value, copied in self._values:
            _write_back(value, copied)
        for value, held in self._opaque:
            opaque.write_state(value, held)

    def _renew_inside(self, content: Any) -> Any:
        if not self._iterators:
            return content
        if isinstance(content, dict):
            return {key: self._renew(one) for key, one in content.items()}
        return [self._renew(one) for one in content] if isinstance(content, list | deque) else content

    def _renew(self, value: Any) -> Any:
        original, copied = self._iterators.get(id(value), (None, None))
        return copy_iterator(copied) if original is value and copied is not None else value


def _holds(kept: KeptValue, value: Any) -> bool:
    held = kept.holder.get(kept.name) if isinstance(kept.holder, dict) else _get(kept.holder, kept.name)
    return held is value


def _get(holder: Any, name: str) -> Any:
    """An attribute. A `__getattribute__` of the user's may raise, as one that warns does where warnings are errors."""
    try:
        return getattr(holder, name, MISSING)
    except Exception:  # noqa: BLE001 - past it
        look: Any = type.__getattribute__ if isinstance(holder, type) else object.__getattribute__
        try:
            return look(holder, name)
        except AttributeError:
            return MISSING


def _shallow(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(items_of(value))
    return bytes(value) if isinstance(value, bytearray) else elements_of(value)


def _refill(holder: Any, content: Any) -> None:
    """Puts back what a container held, where it holds something else, whatever its class makes of a write."""
    if isinstance(holder, dict):
        now = items_of(holder)
        same = len(now) == len(content) and all(
            key is name and one is other for (key, one), (name, other) in zip(now, content.items(), strict=True)
        )
        if not same:
            base: Any = OrderedDict if isinstance(holder, OrderedDict) else dict
            base.clear(holder)
            for key, one in content.items():
                base.__setitem__(holder, key, one)
    elif isinstance(holder, bytearray):
        holder[:] = content
    else:
        now = elements_of(holder)
        if len(now) != len(content) or any(one is not other for one, other in zip(now, content, strict=True)):
            base = next(kind for kind in (list, deque, set) if isinstance(holder, kind))
            base.clear(holder)
            (base.update if base is set else base.extend)(holder, content)


def _copy_value(value: Any) -> Any:
    """None for what is not copied: a parameter, a large tensor."""
    if isinstance(value, torch.Tensor):
        kept = (
            isinstance(value, torch.nn.Parameter)
            or is_lazy(value)
            or value.nbytes > _LARGEST
            or value.layout is not torch.strided
        )
        return None if kept else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _LARGEST and value.flags.writeable else None
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state)
    return copy.deepcopy(value.state) if isinstance(value, np.random.BitGenerator) else value.get_state()


def _write_back(value: Any, copied: Any) -> None:
    if copied is None:
        return
    if isinstance(value, torch.Tensor):
        if trace(value) != trace(copied) and value.shape == copied.shape:
            with torch.no_grad(), suppress(RuntimeError):
                value.copy_(copied)
    elif isinstance(value, np.ndarray):
        value[...] = copied
    elif isinstance(value, random.Random):
        value.setstate(copied)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = copied
    elif isinstance(value, np.random.BitGenerator):
        value.state = copied
    else:
        value.set_state(copied)


@final
class Recall:
    """What `module` kept when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._memento = Memento(module)

    def find_changed(self) -> tuple[str, ...]:
        """What has changed since, by its path."""
        return find_changed(self._memento.traces, take_snapshot(self._module))

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """What the model keeps is afterwards as it was before the block."""
        now = Memento(self._module)
        try:
            yield
        finally:
            clear_caches(self._module)
            now.restore()

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within the block the model keeps what it kept then; afterwards what it keeps now."""
        with self.preserve():
            clear_caches(self._module)
            self._memento.restore()
            yield


def clear_caches(module: torch.nn.Module) -> None:
    """Empties the caches of functools: what is in them cannot be seen, and has to be made again the same."""
    for kept in attributes(module):
        if isinstance(kept.value, functools._lru_cache_wrapper) and _is_own(kept.value):
            kept.value.cache_clear()


def _is_own(cache: Any) -> bool:
    """Whether the user's own code fills a cache, and no installed package."""
    code = getattr(cache.__wrapped__, "__code__", None)
    return code is None or not code_paths.is_installed(code.co_filename)


def random_states() -> tuple[object, object]:
    """Those of Python's and numpy's shared generators, in a form that can be compared."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)
