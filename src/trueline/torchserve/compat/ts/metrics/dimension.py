"""A label of a metric."""

from __future__ import annotations


class Dimension:
    """A name and its value."""

    def __init__(self, name: str, value: object) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"
