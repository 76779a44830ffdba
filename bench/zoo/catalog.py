"""All architectures of the zoo. Those of transformers are listed only where it is installed (setup.sh)."""

from __future__ import annotations

import importlib.util

from bench.zoo import attention, convolution, dynamic, notebook, recurrent, research, structured
from bench.zoo.entry import Architecture, Field, Shelf, flag, lengths, real


def architectures() -> dict[str, Architecture]:
    """By name, in the order in which they are run."""
    shelves = [
        _dynamic(),
        research.SHELF,
        convolution.SHELF,
        recurrent.SHELF,
        attention.SHELF,
        structured.SHELF,
        notebook.SHELF,
    ]
    if importlib.util.find_spec("transformers") is not None:
        from bench.zoo import hugging

        shelves += hugging.SHELVES
    found: dict[str, Architecture] = {}
    for shelf in shelves:
        for one in shelf.found:
            if one.name in found:
                raise ValueError(f"two architectures are called '{one.name}'")
            found[one.name] = one
    return found


def _dynamic() -> Shelf:
    """The hand-written dynamic models."""
    shelf = Shelf(group="dynamic", sizes={"batch": 3, "length": 5})
    rows = real("batch", 4)
    several: dict[str, dict[str, Field]] = {
        "RaggedMeans": {"x": real("batch", "length", 4), "lengths": lengths("length", "batch")},
        "BeamStep": {"x": rows, "scores": real("batch", 2)},
        "Suppress": {"boxes": rows},
        "DictInputs": {"batch.x": rows, "batch.flag": flag("batch")},
    }
    for model in dynamic.EXAMPLES:
        timed = model in dynamic.DYNAMIC
        fields = several.get(model.__name__, {"x": real("batch", "length", 4) if timed else rows})
        shelf.add(model.__name__, model, fields, keywords="batch.x" in fields)
    return shelf
