"""Chooses a version when several share a model's traffic. Pure.

Requests with a key (a user, a session) stay with one version while the weights stay; when a weight grows, keys move
only to that version (weighted rendezvous hashing). Requests without a key are spread at random.
"""

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from trueline.errors import RequestError


@dataclass(frozen=True, slots=True)
class Split:
    """Weights by version, e.g. `{"1": 90, "2": 10}`; they may have any sum."""

    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        wrong = [f"{version}: {weight}" for version, weight in self.weights.items() if not 0 <= weight < 1e9]
        if wrong or not any(self.weights.values()):
            raise RequestError(
                f"weights are numbers from 0 on, and one of them is above 0; got {wrong or dict(self.weights)}"
            )

    def choose(self, key: str = "") -> str:
        """The version for a request of `key`; without one, at random.

        >>> Split({"1": 0, "2": 1}).choose("ann")
        '2'
        """
        if not key:
            return random.choices(list(self.weights), list(self.weights.values()))[0]
        weighed = [(version, weight) for version, weight in self.weights.items() if weight]
        return min(weighed, key=lambda one: -math.log(place(f"{one[0]} {key}")) / one[1])[0]


def place(key: str) -> float:
    """A hash of the key in (0, 1), the same on every machine and in every run."""
    return (int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") + 0.5) / 2**48
