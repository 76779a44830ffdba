"""Questions for a captured program that its prover never asked: other sizes, other values, made another way.

Shares no code with `trueline.capture.proof.probes`, so that the prover and its judge have no blind spot in common:
values are drawn record by record from families that the prover does not have, ids from the whole vocabulary, sizes
from the whole proven range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from bench.zoo.entry import Architecture, Array, Field

FAMILIES = ("normal", "small", "large", "heavy", "sparse", "steps", "whole", "positive", "negative", "flat", "wave")
MAX_ELEMENTS = 200_000
"""Of all inputs of one question together."""
TRIES = 4000


def example(architecture: Architecture) -> dict[str, Array]:
    """The small batch that the user gives: plain values, and some padding where there is a mask."""
    random = np.random.default_rng(7)
    made: dict[str, Array] = {}
    for name, one in architecture.fields.items():
        shape = shape_of(one, architecture.sizes)
        if one.kind == "real":
            made[name] = np.asarray(random.standard_normal(shape)).astype(one.like)
        elif one.kind == "mask":
            padding = np.arange(shape[0])[:, None] % 3  # the last positions of some records
            made[name] = (np.arange(shape[-1]) < np.maximum(1, shape[-1] - padding)).astype(one.like).reshape(shape)
        else:
            made[name] = _plain(one, shape, architecture.sizes, random)
    return made


def shape_of(one: Field, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[size] if isinstance(size, str) else size for size in one.shape)


def sizes_inside(
    architecture: Architecture, inside: Callable[[Mapping[str, Array]], bool], random: np.random.Generator
) -> dict[str, int] | None:
    """Sizes for which `inside` says yes of inputs of that shape; None when none is met."""
    for _ in range(TRIES):
        sizes = {symbol: _size(base, random) for symbol, base in architecture.sizes.items()}
        shapes = {name: shape_of(one, sizes) for name, one in architecture.fields.items()}
        if sum(int(np.prod(shape)) for shape in shapes.values()) > MAX_ELEMENTS:
            continue
        blank = {
            name: np.broadcast_to(np.zeros((), architecture.fields[name].like), shape) for name, shape in shapes.items()
        }
        if inside(blank):
            return sizes
    return None


def _size(base: int, random: np.random.Generator) -> int:
    way = random.random()
    if way < 0.2:
        return int(random.integers(1, 5))
    if way < 0.35:
        return base
    if way < 0.6:
        return max(1, base * int(random.integers(1, 9)) // 2)
    if way < 0.85:
        return int(random.integers(max(1, base // 2), 2 * base + 2))
    return int(random.integers(1, 5 * base + 2))


def question(
    architecture: Architecture, sizes: Mapping[str, int], random: np.random.Generator
) -> tuple[dict[str, Array], str]:
    """Inputs of these sizes, and the family of their values."""
    family = str(random.choice(FAMILIES)) if random.random() < 0.7 else "mixed"
    made: dict[str, Array] = {}
    for name, one in architecture.fields.items():
        shape = shape_of(one, sizes)
        if one.kind == "real":
            made[name] = _reals(shape, family, random).astype(one.like)
        else:
            made[name] = _plain(one, shape, sizes, random)
    return made, family


def _reals(shape: tuple[int, ...], family: str, random: np.random.Generator) -> Array:
    if family != "mixed" or not shape:
        return np.asarray(_drawn(shape, family, random))
    rows = [_drawn(shape[1:], str(random.choice(FAMILIES)), random) for _ in range(shape[0])]
    return np.stack(rows)


def _drawn(shape: tuple[int, ...], family: str, random: np.random.Generator) -> Array:
    normal = random.standard_normal(shape)
    found: Array
    match family:
        case "small":
            found = normal * 0.03
        case "large":
            found = normal * 20
        case "heavy":
            found = random.standard_t(2, shape)
        case "sparse":
            found = normal * (random.random(shape) < 0.1)
        case "steps":
            found = np.sort(normal, axis=-1) if shape else normal
        case "whole":
            found = np.round(normal * 3)
        case "positive":
            found = random.gamma(1.0, 1.0, shape)
        case "negative":
            found = -random.gamma(2.0, 0.5, shape) - 0.1
        case "flat":
            found = np.full(shape, random.standard_normal() * 2)
        case "wave":
            count = int(np.prod(shape))
            found = np.sin(np.arange(count) * random.uniform(0.05, 1.5) + random.uniform(0, 6)).reshape(shape) * 1.5
        case _:
            found = normal
    return found


def _plain(one: Field, shape: tuple[int, ...], sizes: Mapping[str, int], random: np.random.Generator) -> Array:
    match one.kind:
        case "unit":
            return random.random(shape).astype(one.like)
        case "ids":
            assert isinstance(one.below, int)
            top = one.below if random.random() < 0.8 else max(1, one.below // 8)
            return random.integers(0, top, shape).astype(one.like)
        case "lengths":
            assert isinstance(one.below, str)
            return random.integers(1, sizes[one.below], shape, endpoint=True).astype(one.like)
        case "flag":
            return np.asarray(random.random(shape) < random.choice((0.0, 0.1, 0.5, 1.0)))
        case "edges":
            linked = random.random(shape) < random.choice((0.1, 0.4, 0.9))
            return np.maximum(linked | linked.swapaxes(-1, -2), np.eye(shape[-1], dtype=bool)).astype(one.like)
    return _masked(shape, random).astype(one.like)


def _masked(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Padding at the end, at the start, none, or holes; the first position counts unless the start is padded."""
    *rows, length = shape
    kept = random.integers(1, length, rows, endpoint=True)[..., None]
    at = np.arange(length)
    way = random.random()
    if way < 0.5:
        return at < kept
    if way < 0.65:
        return at >= length - kept
    if way < 0.85:
        return np.ones(shape, bool)
    holes = random.random(shape) < 0.6
    holes[..., 0] = True
    return holes
