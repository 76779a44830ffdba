"""The feed of recipes that declare `columns`: records become tensors as the fitted columns say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from trueline.columns.fitted import FittedColumns
from trueline.data.source import Mode


class ColumnFeed:
    """`augment` changes the inputs of training records; it draws from the process's generators, which `seeding` sets
    for each record."""

    def __init__(self, fitted: FittedColumns, augment: Callable[[Any], Any] | None = None) -> None:
        self.fitted, self._augment = fitted, augment

    def __call__(self, records: pa.Table, mode: Mode) -> tuple[Any, Any]:
        """The inputs as a dict of tensors, the labels as a tensor, a dict of several, or None. Raises DataError."""
        arrays, labels = self.fitted.encode_table(records, labels=mode != "prediction")
        inputs = _tensors(arrays)
        if self._augment is not None and mode == "training":
            inputs = self._augment(inputs)
        return inputs, _tensors(labels)


def _tensors(arrays: Any) -> Any:
    import torch

    if isinstance(arrays, dict):
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return None if arrays is None else torch.from_numpy(arrays)
