"""Where a model's outputs are in what it returns: the places that its example shows, which every other answer needs.

A program has the same outputs for every request, and a client reads them by name. An answer with another key or with
None at another place has no such form, even where its tensors are as many: it is an error, and no output under a name
that the model did not give it. The order of a dict's keys tells nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from trueline.capture.model.arguments import register_containers
from trueline.errors import CaptureError, join_names

Path = tuple[Any, ...]
HINT = "a bundle has the same outputs for every request: return all of them always, and a flag for those that are valid"


@dataclass(frozen=True, slots=True)
class OutputPlaces:
    """The form of an answer."""

    spec: Any
    """torch's TreeSpec of it."""
    places: tuple[Path, ...]
    """Of each tensor, in order."""
    leaves: tuple[bool, ...]
    """Which leaves are tensors; None and Python's numbers are none."""

    @staticmethod
    def learn(answer: Any) -> "OutputPlaces":
        """The form of `answer`, to the model's own example."""
        register_containers(answer)
        leaves, spec = pytree.tree_flatten(answer)
        return OutputPlaces(spec, tuple(_find_tensors(answer)), tuple(_are_tensors(leaves)))

    def take(self, answer: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of `answer` in the order of the example's. Raises CaptureError for one of another form."""
        leaves, spec = pytree.tree_flatten(answer)
        if _are_tensors(leaves) == list(self.leaves) and spec == self.spec:
            return tuple(leaf for leaf, kept in zip(leaves, self.leaves, strict=True) if kept)
        found = _find_tensors(answer)
        if found.keys() == set(self.places):
            return tuple(found[place] for place in self.places)
        how = f"{len(found)} tensors, and {len(self.places)} on its example"
        if len(found) == len(self.places):
            more = [name_output(path) for path in found if path not in self.places]
            fewer = [name_output(path) for path in self.places if path not in found]
            how = f"{join_names(more)}, and on its example {join_names(fewer)}"
        raise CaptureError(f"the model returned {how}", hint=HINT)


def name_output(path: Path) -> str:
    """What the tensor at `path` of an answer is called: keys and fields, `output` alone, `output_1` in a tuple.

    >>> paths = [path for path, _ in pytree.tree_flatten_with_path(({"a": 1}, 2))[0]]
    >>> [name_output(path) for path in paths], name_output(())
    (['output_0.a', 'output_1'], 'output')
    """
    steps = [name_step(step) for step in path]
    if not steps or steps[0].isdigit():
        steps = ["output" if not steps else f"output_{steps[0]}", *steps[1:]]
    return ".".join(steps)


def name_step(key: Any) -> str:
    """One step of a path: a key, an index, a field."""
    return next((str(getattr(key, name)) for name in ("key", "idx", "name") if hasattr(key, name)), str(key))


def _find_tensors(answer: Any) -> dict[Path, torch.Tensor]:
    return {path: leaf for path, leaf in pytree.tree_flatten_with_path(answer)[0] if isinstance(leaf, torch.Tensor)}


def _are_tensors(leaves: list[Any]) -> list[bool]:
    return [isinstance(leaf, torch.Tensor) for leaf in leaves]
