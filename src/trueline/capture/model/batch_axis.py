"""Which dimension of each input counts the records of the batch: the first, as a rule, another, or none.

A recurrent state comes as [layers, batch, width], a model that takes the steps first wants [length, batch, width], and
a scale, a table or the edges of a graph count no records: they are the same for all. What the sizes leave open, a
declared name `batch` says; what they suggest is taken when the model answers one record more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from trueline.bundle.signature import TensorSpec
from trueline.capture.model.dynamic_dims import BATCH, Leads, Place, resized
from trueline.errors import CaptureError

Batches = Sequence[Sequence[torch.Tensor]]
Answers = Callable[[Sequence[torch.Tensor]], bool]
"""Whether the model can be called with such tensors in place of the first example's."""


def leading(
    specs: Sequence[TensorSpec], batches: Batches, declared: Mapping[Place, str], answers: Answers
) -> tuple[Leads, list[int]]:
    """The dimension of each input that counts records, and how many records each of `batches` holds.

    Raises CaptureError for inputs that agree on no number of records, or leave open which dimension it is.
    """
    data = [at for at, spec in enumerate(specs) if spec.role == "data"]
    if not data:
        raise CaptureError("the example holds no tensor; give the model at least one")
    said = {name: axis for (name, axis), symbol in declared.items() if symbol == BATCH}
    first = _first(specs, batches, data, said)
    if first is None:
        raise _unlike(specs, batches[0])
    axis = said.get(specs[first].name, 0)
    counts = [batch[first].shape[axis] for batch in batches]
    sure: Leads = {}
    doubtful: Leads = {}
    for at in data:
        name = specs[at].name
        if name in said or _counts(batches, at, 0, counts):
            sure[name] = said.get(name, 0)
        else:
            doubtful[name] = _elsewhere(specs[at], batches, at, counts, declared)
    if min(counts) < 1:
        raise CaptureError("the example holds no record", hint="give a batch of a few records")
    held = all(_counts(batches, at, sure.get(specs[at].name) or 0, counts) for at in data if specs[at].name in sure)
    if not held:
        raise _unlike(specs, batches[0])
    if not doubtful:
        return sure, counts
    for guess in _guesses(doubtful):
        if answers(_one_more(specs, batches[0], sure | guess, counts[0])):
            return sure | guess, counts
    raise _unlike(specs, batches[0], ", and the model does not take one record more")


def _first(specs: Sequence[TensorSpec], batches: Batches, data: Sequence[int], said: Mapping[str, int]) -> int | None:
    """The input that says how many records there are: one that is declared, or whose first dimension varies, or the
    first that has one."""
    led = [at for at in data if specs[at].shape]
    named = [at for at in led if specs[at].name in said]
    varying = [at for at in led if len({batch[at].shape[0] for batch in batches}) > 1]
    return next(iter([*named, *varying, *led]), None)


def _counts(batches: Batches, at: int, axis: int, counts: Sequence[int]) -> bool:
    tensors = [batch[at] for batch in batches]
    return all(one.ndim > axis and one.shape[axis] == count for one, count in zip(tensors, counts, strict=True))


def _elsewhere(
    spec: TensorSpec, batches: Batches, at: int, counts: Sequence[int], declared: Mapping[Place, str]
) -> int | None:
    """The one further dimension that is as large as the batch in every example; None where none is."""
    found = [
        axis
        for axis in range(1, len(spec.shape))
        if (spec.name, axis) not in declared and _counts(batches, at, axis, counts)
    ]
    if len(found) > 1:
        raise CaptureError(
            f"input '{spec.name}' has the size of the batch ({counts[0]}) in dimensions {found}: which counts the "
            "records is not clear",
            hint=f"say it: dynamic_shapes() returns {{'{spec.name}': {{{found[0]}: '{BATCH}'}}}}; or yield a second "
            "example of another batch size",
        )
    return found[0] if found else None


def _guesses(doubtful: Leads) -> Iterator[Leads]:
    """As the sizes suggest, then with none of the doubtful inputs following the batch."""
    yield doubtful
    if any(axis is not None for axis in doubtful.values()):
        yield dict.fromkeys(doubtful)


def _one_more(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], leads: Leads, count: int
) -> list[torch.Tensor]:
    axes = [leads.get(spec.name) for spec in specs]
    return [
        tensor if axis is None else resized(tensor, {axis: count + 1})
        for tensor, axis in zip(tensors, axes, strict=True)
    ]


def _unlike(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], more: str = "") -> CaptureError:
    listing = ", ".join(
        f"{spec.name}: {list(tensor.shape)}" for spec, tensor in zip(specs, tensors, strict=True) if spec.role == "data"
    )
    return CaptureError(
        f"the inputs agree on no number of records ({listing}){more}",
        hint="the first dimension of every input is the batch; where it is another, dynamic_shapes() says so: "
        f"{{'h': {{1: '{BATCH}'}}}}",
    )
