"""ElasticDL's `dataset_fn(data_list, mode, metadata)`, which receives records.

In ElasticDL the command line names their location; here the recipe does, in `training_data`, `evaluation_data`
(ElasticDL's `validation_data`) and `prediction_data`: URIs as `dataset(mode)` would return them. So a recipe of two
lines uses a module of ElasticDL's zoo unchanged:

    from mnist import *
    training_data = "records/*.recordio"

Source: ElasticDL's design document "ElasticDL Work Together with PyTorch", whose `dataset_fn` this is.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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

_MODULES = {
    head + tail for head in ("elasticdl", "elasticdl.python.elasticdl") for tail in ("", ".layers", ".layers.embedding")
} | {"elasticdl.python"}
_LAYERS = "trueline.ps.model.elasticdl"
"""Where the layer is; by name, since that room stands above this one."""


class LayerFinder(MetaPathFinder, Loader):
    """Finds ElasticDL's modules with `Embedding` where ElasticDL, which needs TensorFlow, is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in _MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        module.Embedding = importlib.import_module(_LAYERS).make_layer  # type: ignore[attr-defined]


@contextmanager
def provide_layers() -> Iterator[None]:
    """Within the context a recipe that imports ElasticDL's `Embedding` gets Trueline's."""
    finder = LayerFinder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@dataclass(frozen=True, slots=True)
class RatedOptimizer:
    """An `optimizer(params)` of ElasticDL's `optimizer(lr=...)`, which returns what is called with the parameters."""

    function: Callable[..., Any]

    def __call__(self, params: Any) -> Any:
        made = self.function()
        if not callable(made):
            raise RecipeError(
                f"optimizer(lr) returned {type(made).__name__}, expected what takes the model's parameters",
                hint="write `def optimizer(params, lr=0.1): return torch.optim.SGD(params, lr)`, or return "
                "`lambda params: torch.optim.SGD(params, lr)`",
            )
        return made(params)


def takes_rate(function: object) -> bool:
    """Whether `function` has the form `optimizer(lr=...)`: its first parameter is a learning rate."""
    signature = signature_of(function) if callable(function) else None
    first = next(iter(signature.parameters.values()), None) if signature is not None else None
    return first is not None and first.name in ("lr", "learning_rate") and first.default is not first.empty


def takes_records(function: object) -> bool:
    """Whether `function` has ElasticDL's form: three required arguments."""
    signature = signature_of(function) if callable(function) and not isinstance(function, type) else None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values() if signature is not None else ()
    required = [one for one in parameters if one.default is inspect.Parameter.empty]
    return len(required) == 3 and all(one.kind in positional for one in required)


def takes_features(model: object) -> bool:
    """Whether `model` is a class whose forward has one parameter, `features` or one that is annotated as a mapping, as
    Keras' models have, whose place ElasticDL's take."""
    if not isinstance(model, type) or (signature := signature_of(getattr(model, "forward", model))) is None:
        return False
    parameters = list(signature.parameters.values())[1:]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(parameters) != 1 or len(named) != 1:
        return False
    return named[0].name == "features" or "dict" in str(named[0].annotation).lower().replace("mapping", "dict")


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
    together: bool = False
    """The model's forward takes the features of a batch as one dict, by name; else each is an argument."""

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
        inputs = _batch(features, len(records), "features")
        if self.together and isinstance(inputs, dict):
            inputs = (inputs,)
        return inputs, _batch(labels, len(records), "labels")


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
