"""`torch.nn.Embedding(sparse=True)` of a recipe's model as tables of the servers, and back in the checkpoint.

The job's servers then hold the rows that were trained, and a checkpoint has the whole `weight` again, so that the
recipe's own model takes it. Rows that were not trained have the initial value that training would have found there.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors
import torch
from msgspec.structs import replace
from torch import nn

from trueline.errors import UsageError
from trueline.ps.model.embedding import Embedding, Rows
from trueline.ps.model.minibatch import Tables
from trueline.ps.partition import Ids

_SHAPE = 1.8
"""A uniform value is at most 1.73 standard deviations from its mean; of many normal ones some are farther."""


class VocabularyTable(Embedding):
    """A table of `size` ids from 0 on, in the place of a torch.nn.Embedding."""

    def __init__(self, embedding: nn.Embedding, name: str) -> None:
        weight = embedding.weight.detach()
        spread, largest = float(weight.std()), float(weight.abs().max())
        uniform = largest <= _SHAPE * spread
        super().__init__(
            embedding.embedding_dim, name=name, init="zeros" if not largest else "uniform" if uniform else "normal",
            scale=largest if uniform else spread,
        )  # fmt: skip
        self.size = embedding.num_embeddings
        self.settings = replace(self.settings, padding_idx=embedding.padding_idx)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """[*ids.shape, dim] float32. Raises UsageError for ids outside the vocabulary."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.size:
            raise UsageError(
                f"ids of table '{self.table}' are {int(ids.min())} to {int(ids.max())}, expected 0 to {self.size - 1}"
            )
        return super().look_up(ids)

    def state_entries(self, ids: Ids, rows: Rows, initial: Callable[[Ids], Rows]) -> dict[str, torch.Tensor]:
        weight = initial(np.arange(self.size, dtype=np.int64))
        if self.settings.padding_idx is not None:
            weight[self.settings.padding_idx] = 0.0
        weight[ids] = rows
        return {"weight": torch.from_numpy(weight)}


def convert_embeddings(model: nn.Module, rows_above: int) -> list[str]:
    """Puts a table in the place of each `torch.nn.Embedding(sparse=True)` of more than `rows_above` rows; returns their
    names. Call it before the optimizer is made. Raises UsageError when there is none.

    Embeddings that share their weight with another layer, or have max_norm or scale_grad_by_freq, stay as they are.
    """
    users: dict[int, int] = {}
    for module in model.modules():
        for one in module.parameters(recurse=False):
            users[id(one)] = users.get(id(one), 0) + 1
    made: dict[int, VocabularyTable] = {}
    names = []
    for path, module in list(model.named_modules(remove_duplicate=False)):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Embedding) or not _is_convertible(child, rows_above, users):
                continue
            full = f"{path}.{name}" if path else name
            if id(child) not in made:
                made[id(child)] = VocabularyTable(child, full)
                names.append(full)
            setattr(module, name, made[id(child)])
    if not names:
        sizes = [f"{path} has {one.num_embeddings}{'' if one.sparse else ' and is not sparse'}"
                 for path, one in model.named_modules() if isinstance(one, nn.Embedding)]  # fmt: skip
        raise UsageError(
            f"the model has no torch.nn.Embedding(sparse=True) of more than {rows_above} rows that can be a table",
            hint=f"{', '.join(sizes) or 'it has no torch.nn.Embedding'}; one with max_norm, scale_grad_by_freq or a "
            "shared weight stays as it is",
        )
    return names


def refuse_table_weights(tables: Tables, file: Path) -> None:
    """Raises UsageError if the weights that a training starts from have rows: tables begin with initial values."""
    with safetensors.safe_open(file, framework="np") as given:
        sizes = {key: given.get_slice(key).get_shape() for key in given.keys()}  # noqa: SIM118  it is no mapping
    for name, prefixes in tables.prefixes.items():
        for prefix in prefixes:
            found = sizes.get(f"{prefix}weight") or sizes.get(f"{prefix}rows")
            if found and found[0]:
                raise UsageError(
                    f"--weights has {found[0]} rows of table '{name}', and tables of servers begin with initial values",
                    hint=f"--new-layers {prefix.removesuffix('.')} trains it from the beginning; a torch.nn.Embedding "
                    "that is no table keeps them",
                )


def _is_convertible(embedding: nn.Embedding, rows_above: int, users: dict[int, int]) -> bool:
    plain = embedding.sparse and embedding.max_norm is None and not embedding.scale_grad_by_freq
    return plain and embedding.num_embeddings > rows_above and users[id(embedding.weight)] == 1
