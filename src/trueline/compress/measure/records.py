"""Records of the recipe as named inputs of the bundle's program, and its answers as the recipe's metrics take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from trueline.capture.model.arguments import as_arguments
from trueline.data.loading.seeding import seed_generators
from trueline.data.source import Source
from trueline.errors import CaptureError, DataError, RecipeError, RequestError, TruelineError, UsageError, first_line
from trueline.recipe.contract import Mode, Recipe
from trueline.recipe.eager_mode import as_trained
from trueline.train.worker.measure import call_model

if TYPE_CHECKING:
    from trueline.bundle.signature import Array, Signature

CHUNK = 256
"""Records that a program gets at a time when answers, not times, are measured."""
CALIBRATION = 512
"""Training records that ranges are taken from."""


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Inputs of the program by name, and the labels of these records."""

    inputs: dict[str, Array]
    labels: Any
    count: int


@dataclass(frozen=True, slots=True)
class ProgramRecords:
    """The records of one mode, as inputs of a program with `signature`."""

    source: Source
    signature: Signature
    mode: Mode

    @property
    def count(self) -> int:
        return self.source.num_records

    def read(self, start: int, stop: int) -> RecordBatch:
        """Records [start, stop). Raises DataError; UsageError for records that the program does not take."""
        with seed_generators(start):
            batch = self.source.read(np.arange(start, stop, dtype=np.int64))
        inputs = name_inputs(self.signature, batch.inputs)
        try:
            self.signature.check(inputs)
        except RequestError as error:
            raise UsageError(
                f"the program does not take the recipe's {self.mode} records: {error.message}",
                hint="give the recipe that the bundle was captured from (--recipe)",
            ) from error
        return RecordBatch(inputs, batch.labels, stop - start)

    def batches(self, limit: int | None = None, size: int = CHUNK) -> Iterator[RecordBatch]:
        """The first `limit` records in batches of `size`; one by one where records of unequal sizes make no batch."""
        stop = self.count if limit is None else min(limit, self.count)
        for start in range(0, stop, size):
            end = min(start + size, stop)
            try:
                yield self.read(start, end)
            except DataError:
                if end - start == 1:
                    raise
                for at in range(start, end):
                    yield self.read(at, at + 1)


def open_records(recipe: Recipe, mode: Mode, signature: Signature) -> ProgramRecords:
    """The recipe's records for `mode`. Raises RecipeError where there are none, DataError."""
    try:
        source = recipe.source(mode)
    except (RecipeError, DataError) as error:
        raise RecipeError(f"there are no {mode} records to compress with: {error.message}", hint=_DATA) from error
    except TruelineError:
        raise
    except Exception as error:
        what = f"dataset('{mode}') raised {type(error).__name__}: {first_line(error)}"
        raise RecipeError(f"there are no {mode} records to compress with: {what}", hint=_DATA) from error
    return ProgramRecords(source, signature, mode)


_DATA = "the recipe's dataset('evaluation') judges what is lost, its dataset('training') calibrates"


def name_inputs(signature: Signature, inputs: Any) -> dict[str, Array]:
    """The tensors of a batch by the signature's names, in the order in which the model is called with them."""
    arguments = as_arguments(inputs)
    leaves = pytree.tree_leaves((arguments.args, arguments.kwargs))
    tensors = [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)]
    if len(tensors) != len(signature.inputs):
        raise UsageError(
            f"the recipe's records have {len(tensors)} tensors, and the program takes {len(signature.inputs)} inputs",
            hint="give the recipe that the bundle was captured from (--recipe)",
        )
    return {spec.name: tensor.numpy() for spec, tensor in zip(signature.inputs, tensors, strict=True)}


class OutputForm:
    """The form of the model's outputs (a tensor, a tuple, a dict), learnt by calling it once."""

    def __init__(self, model: torch.nn.Module, inputs: Any, signature: Signature) -> None:
        with torch.no_grad(), as_trained():
            found = call_model(model, inputs)
        leaves, self._spec = pytree.tree_flatten(found)
        self._names = [spec.name for spec in signature.outputs]
        self._tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self._leaves = leaves
        if sum(self._tensors) != len(self._names):
            raise CaptureError(
                f"the recipe's model returns {sum(self._tensors)} tensors, and the program {len(self._names)}",
                hint="give the recipe that the bundle was captured from (--recipe)",
            )

    def build(self, outputs: Mapping[str, Array]) -> Any:
        """The outputs of a program in the form that the recipe's loss and metrics take."""
        named = iter(torch.from_numpy(np.ascontiguousarray(outputs[name])) for name in self._names)
        leaves = [next(named) if tensor else leaf for tensor, leaf in zip(self._tensors, self._leaves, strict=True)]
        return pytree.tree_unflatten(leaves, self._spec)
