"""The states of the process's generators of random numbers, read where they lie: whether something was drawn.

Each is a Mersenne twister: 624 words and a position in them. With a draw the position moves, or it starts again and the
words change, so the position and the first word tell. Python's getstate makes 625 objects, numpy's and torch's copy 2.5
and 5 KB: together 40 us after a step's matrices have emptied the caches, four times a step. Where an interpreter or a
torch holds a generator otherwise, which is tried, its whole state is read.
"""

from __future__ import annotations

import ctypes
import platform
import random
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_WORDS = 624
_PYTHON: random.Random = random.seed.__self__  # type: ignore[attr-defined]
"""What the functions of the module `random` draw from."""
_Place = ctypes.c_uint8 | ctypes.c_uint32
_SEED, _NEAR = 0x5851F42D4C957F2D, 160
"""A seed, and bytes from the begin of a generator of torch among which it is looked for."""


def generator_state() -> tuple[Any, ...]:
    """Of Python's, numpy's and torch's global generators, and of that of the current CUDA device where it is used.
    Equal states mean that nothing was drawn in between."""
    places = _find_all(np.random.mtrand._rand._bit_generator)
    if places:
        return tuple([place.value for place in places])
    return *single_states(), *_torch_states()


def single_states() -> tuple[Any, ...]:
    """Of Python's and numpy's, which code draws single numbers from."""
    return _python_state(), _numpy_state()


@lru_cache(maxsize=2)
def _find_all(numpys: np.random.BitGenerator) -> tuple[_Place, ...]:
    """Those of all three, which are then read at once; empty: some are not known, or a device has a generator too."""
    import torch

    torchs = _torch_places(getattr(torch.default_generator, "_cdata", 0))
    if type(numpys) is not np.random.MT19937 or not _PYTHON_PLACES or not torchs or torch.accelerator.is_available():
        return ()
    return *_PYTHON_PLACES, *_numpy_places(numpys), *torchs


def cuda_states() -> list[torch.Tensor]:
    """The state of the generator of the current CUDA device, where this process uses one."""
    import torch

    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.cuda.get_rng_state()] if used else []


def _read(places: tuple[_Place, ...]) -> tuple[int, ...]:
    return tuple([place.value for place in places])


def _twister_places(generator: random.Random) -> tuple[_Place, ...]:
    """CPython's object: header, position, words."""
    address = id(generator) + object.__basicsize__
    return ctypes.c_uint32.from_address(address), ctypes.c_uint32.from_address(address + 4)


def _find_python() -> tuple[_Place, ...]:
    """Those of Python's own; empty: they are not known."""
    probe = random.Random(7)
    if platform.python_implementation() != "CPython":
        return ()
    if type(probe).__basicsize__ < object.__basicsize__ + (1 + _WORDS) * 4:
        return ()
    probe.random()
    state: tuple[int, ...] = probe.getstate()[1]
    return _twister_places(_PYTHON) if _read(_twister_places(probe)) == (state[_WORDS], state[0]) else ()


_PYTHON_PLACES = _find_python()


def _python_state() -> tuple[int, ...]:
    return _read(_PYTHON_PLACES) if _PYTHON_PLACES else _PYTHON.getstate()[1]


def _numpy_state() -> tuple[int, ...]:
    generator = np.random.mtrand._rand._bit_generator
    if type(generator) is not np.random.MT19937:  # set_bit_generator was called
        return hash(str(generator.state)), 0
    return _read(_numpy_places(generator))


@lru_cache(maxsize=2)
def _numpy_places(generator: np.random.MT19937) -> tuple[_Place, ...]:
    address = generator.ctypes.state_address
    return ctypes.c_uint32.from_address(address), ctypes.c_uint32.from_address(address + _WORDS * 4)


def _torch_states() -> list[Any]:
    import torch

    generator = torch.default_generator
    places = _torch_places(getattr(generator, "_cdata", 0))
    own: Any = _read(places) if places else generator.get_state().numpy().tobytes()
    return [own, *(state.numpy().tobytes() for state in cuda_states())]


@lru_cache(maxsize=2)
def _torch_places(address: int) -> tuple[_Place, ...]:
    """Those of the generator at `address`; empty: they are not known.

    torch's CPUGeneratorImpl holds a `mt19937_data_pod` (ATen/core/MT19937RNGEngine.h: seed, words left, whether it is
    seeded, position, words), and behind it the second of a pair of normal numbers, in single and in double precision,
    each with a flag that says whether it is there.
    """
    import torch

    probe = torch.Generator()
    probe.manual_seed(_SEED)
    begin: int = getattr(probe, "_cdata", 0)
    if not address or not begin:
        return ()
    near = ctypes.string_at(begin, _NEAR)
    seed = near.find(struct.pack("<Q", _SEED))
    words = seed + 20
    if seed < 0 or near[words : words + 4] != struct.pack("<I", _SEED & 0xFFFFFFFF):  # the first word of a new twister
        return ()
    kept = words + _WORDS * 4 + 4
    layout: list[tuple[type[_Place], int]] = [
        (ctypes.c_uint32, seed + 8), (ctypes.c_uint32, seed + 16), (ctypes.c_uint32, words),
        (ctypes.c_uint8, kept + 4), (ctypes.c_uint8, kept + 16),
    ]  # fmt: skip
    tried = tuple(kind.from_address(begin + offset) for kind, offset in layout)
    shown = all(_shows(tried, probe, draw) for draw in _draws())
    return tuple(kind.from_address(address + offset) for kind, offset in layout) if shown else ()


def _draws() -> list[Callable[[torch.Generator], object]]:
    """Twice a kind that is drawn in pairs: the second one only takes what was kept."""
    import torch

    pair = [lambda one: torch.randn(1, generator=one), lambda one: torch.randn((), dtype=torch.float64, generator=one)]
    rest = [lambda one: torch.rand(2 * _WORDS, generator=one), lambda one: torch.randint(2, (1,), generator=one)]
    return [*pair, *pair, pair[0], *rest, pair[1], pair[1]]


def _shows(places: tuple[_Place, ...], generator: torch.Generator, draw: Callable[[torch.Generator], object]) -> bool:
    """Whether `places` are others after a draw, and the same again when the state is."""
    before, state = _read(places), generator.get_state()
    draw(generator)
    after, later = _read(places), generator.get_state()
    generator.set_state(state)
    back = _read(places) == before
    generator.set_state(later)
    return back and before != after == _read(places)
