"""ElasticDL's `dataset_fn(data_list, mode, metadata)`, which receives records.

In ElasticDL the command line names their location; here the recipe does, in `training_data`, `evaluation_data`
(ElasticDL's `validation_data`) and `prediction_data`: URIs as `dataset(mode)` would return them. So a recipe of two
lines uses a module of ElasticDL's zoo unchanged:

    from mnist import *
    training_data = "records/*.recordio"

Source: ElasticDL's design document "ElasticDL Work Together with PyTorch", whose `dataset_fn` this is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trueline.errors import DataError, RecipeError

if TYPE_CHECKING:
    import pyarrow as pa

    from trueline.data.source import Mode

FORM = "dataset_fn(data_list, mode, metadata) -> (features, labels)"
PLACES: dict[str, tuple[str, ...]] = {
    "training": ("training_data",),
    "evaluation": ("evaluation_data", "validation_data"),
    "prediction": ("prediction_data",),
}
"""Mode -> the names of the value with the URI of its records."""


def takes_records(function: object) -> bool:
    """Whether `function` has ElasticDL's form: three required arguments."""
    signature = signature_of(function) if callable(function) and not isinstance(function, type) else None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values() if signature is not None else ()
    required = [one for one in parameters if one.default is inspect.Parameter.empty]
    return len(required) == 3 and all(one.kind in positional for one in required)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """None for callables without a known signature (some that are written in C)."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Metadata:
    """The records' columns, for `dataset_fn`."""

    column_names: list[str]
    column_dtypes: list[str]
    """Arrow's names: `int64`, `binary`, ..."""


@dataclass(frozen=True, slots=True)
class DataPlaces:
    """A `dataset(mode)` that returns the URI in the recipe's values."""

    values: Mapping[str, Any]

    def __call__(self, mode: Mode) -> Any:
        for name in PLACES[mode]:
            if self.values.get(name):
                return self.values[name]
        name = PLACES[mode][0]
        raise RecipeError(
            f"`{FORM}` receives records, and the recipe does not say where those for {mode} are",
            hint=f'set {name} = "URI" beside it, e.g. {name} = "records/*.recordio"',
        )


@dataclass(frozen=True, slots=True)
class Feed:
    """A `feed(records, mode)` of a `dataset_fn`.

    `data_list` holds one value for each record: that of its only column (bytes for RecordIO), or the list of its
    columns' values.
    """

    dataset_fn: Callable[[list[Any], Mode, Metadata], Any]

    def __call__(self, records: pa.Table, mode: Mode) -> tuple[Any, Any]:
        columns = [column.to_pylist() for column in records.columns]
        data_list = columns[0] if len(columns) == 1 else [list(row) for row in zip(*columns, strict=True)]
        schema = records.schema
        metadata = Metadata(list(schema.names), [str(field.type) for field in schema])
        found = self.dataset_fn(data_list, mode, metadata)
        both = isinstance(found, tuple) and len(found) == 2
        if not both and mode != "prediction":
            raise RecipeError(f"dataset_fn returned {type(found).__name__} for {mode}, expected (features, labels)")
        features, labels = found if both else (found, None)
        return _batch(features, len(records), "features"), _batch(labels, len(records), "labels")


def _batch(values: Any, count: int, what: str) -> Any:
    """A batch of tensors. Raises DataError when it is not of `count` records."""
    import torch
    from torch.utils.data import default_collate

    if values is None:
        return None
    if isinstance(values, Mapping):
        return {key: _batch(value, count, f"{what}[{key!r}]") for key, value in values.items()}
    if len(values) != count:
        why = f"dataset_fn made {len(values)} {what} of {count} records"
        raise DataError(why, hint="it has to return one for each")
    if isinstance(values, Sequence) and not isinstance(values, str):
        arrays = all(isinstance(value, np.ndarray) for value in values)  # often read-only views of bytes
        return torch.from_numpy(np.stack(values)) if arrays else default_collate(list(values))
    return values if isinstance(values, torch.Tensor) else torch.tensor(values)
