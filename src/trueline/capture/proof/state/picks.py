"""Draws out of a collection (`random.choice`, `sample`, `shuffle`): what is drawn once in 10,000 calls is drawn now.

A number that is drawn is compared, and `tainted.py` turns that. An element may be of any kind and may be used as it is,
so each of the different ones has its turn.
"""

import random
import secrets
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NAMES = frozenset({"choice", "choices", "sample", "shuffle", "permutation", "permuted"})
OF_PYTHON = """random uniform gauss normalvariate expovariate betavariate triangular randint randrange getrandbits
choice choices sample shuffle""".split()  # noqa: SIM905 - as prose they take two lines
_OF_NUMPY = """random rand randn random_sample uniform normal randint binomial poisson exponential geometric beta gamma
standard_normal choice permutation shuffle""".split()  # noqa: SIM905 - as prose they take two lines
_OF_SECRETS = ("randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe", "choice")
DRAWS = (
    *((random, name) for name in OF_PYTHON),
    *((np.random, name) for name in _OF_NUMPY),
    *((secrets, name) for name in _OF_SECRETS),
    *((uuid, name) for name in ("uuid1", "uuid4")),
)
"""Functions of modules that draw."""
MOST = 24
"""Elements that have a turn."""
_LONGEST = 100_000


FRESH: tuple[tuple[Any, str], ...] = ((random, "Random"), (np.random, "default_rng"), (np.random, "RandomState"))
"""What makes a generator, which without a seed takes one from the machine."""
SEED = 20_011


class _LikeKind(type):
    """Of a class that stands in for its base: all instances of that are instances of it."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[1])


def make_fresh(kind: Any, give: Callable[[Any], Any]) -> Any:
    """`kind`, a class of generators or a function that makes one; `give` returns what is given for one without a
    seed."""

    def make(*args: Any, **options: Any) -> Any:
        made = kind(*args, **options)
        return made if any(one is not None for one in (*args, *options.values())) else give(made)

    if not isinstance(kind, type):
        return make
    return _LikeKind(kind.__name__, (kind,), {"__new__": lambda cls, *args, **options: make(*args, **options)})


def seed(generator: Any) -> Any:
    """A generator of that kind that draws the same each time."""
    return np.random.default_rng(SEED) if isinstance(generator, np.random.Generator) else type(generator)(SEED)


def pick(function: Callable[..., Any], name: str, at: int) -> Callable[..., Any]:
    """`function`, a draw of that name, in whose results the different element number `at` stands first."""

    def draw(*args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        population = args[0] if args else next(iter(options.values()), None)
        chosen = _different(population, _weights_of(name, args, options))
        if not chosen:
            return found
        value = chosen[at % len(chosen)]
        if name in ("shuffle", "permutation", "permuted", "sample"):
            _put_first(args[0] if name == "shuffle" else found, value)
            return found
        if isinstance(found, list):
            return [value] * len(found)
        return np.full_like(found, value) if isinstance(found, np.ndarray) and found.ndim else value

    return draw


def _weights_of(name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
    place = {"choices": 1, "choice": 3}.get(name, len(args))
    given = args[place] if len(args) > place else None
    return options.get("weights", options.get("p", given))


def _different(population: Any, weights: Any) -> list[Any]:
    """Elements of the population that may be drawn, each value once: the rare ones first."""
    if isinstance(population, int):
        population = range(population)
    try:
        count = min(len(population), _LONGEST)
        elements = [population[index] for index in range(count) if weights is None or weights[index] > 0]
    except (TypeError, KeyError, IndexError):
        return []
    counts: dict[str, int] = {}
    first: dict[str, Any] = {}
    for one in elements:
        key = repr(one) if isinstance(one, int | float | str | np.generic) else f"{id(one)}"
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, one)
    return [first[key] for key in sorted(counts, key=counts.__getitem__)[:MOST]]


def _put_first(drawn: Any, value: Any) -> None:
    """Swaps `value` with what stands first; a sample without it begins with it."""
    if not len(drawn):
        return
    place = next((index for index, one in enumerate(drawn) if one is value or bool(np.all(one == value))), None)
    if place is not None:
        drawn[place] = drawn[0]
    drawn[0] = value
