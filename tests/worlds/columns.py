"""Tables as users have them, and columns fitted to them in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from trueline.columns import Category, Label, Number, Series, Text
from trueline.columns.declared import Declared
from trueline.columns.fit import fit
from trueline.columns.fitted import FittedColumns
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe


def fitted(table: pa.Table, declared: dict[str, Declared], rows: int = 7) -> FittedColumns:
    def tables(names: Sequence[str]) -> Iterator[pa.Table]:
        for start in range(0, len(table), rows):
            yield table.select(names).slice(start, rows)

    return fit(declared, tables, table.schema)


def table_of(seed: int = 0, count: int = 500) -> pa.Table:
    random = np.random.default_rng(seed)
    ages = [None if random.random() < 0.1 else float(age) for age in random.normal(40, 9, count)]
    visits = [None if random.random() < 0.1 else int(n) for n in random.integers(0, 9, count)]
    cities = [["Berlin", "São Paulo", "", None, "東京"][at] for at in random.integers(0, 5, count)]
    words = [" ".join(random.choice(["Good", "bad", "so-so", "né"], 3)) for _ in range(count)]
    labels = [[">50K", "<=50K"][at] for at in random.integers(0, 2, count)]
    spent = [[float(one) for one in random.normal(20, 5, random.integers(0, 6))] for _ in range(count)]
    return pa.table({"age": ages, "visits": visits, "city": cities, "review": words, "spent": spent, "income": labels})


DECLARED: dict[str, Declared] = {
    "age": Number(missing="mean"),
    "visits": Number(missing="median", scale="minmax", indicator=True),
    "city": Category(),
    "review": Text(max_length=4),
    "spent": Series(max_length=4),
    "income": Label(),
}


def write_tables(folder: Path) -> Path:
    """The parts of `recipe_in`, sixty records each."""
    for seed, mode in enumerate(("training", "evaluation", "prediction")):
        pq.write_table(table_of(seed, 60), folder / f"{mode}.parquet")
    return folder


class Model(nn.Module):
    def __init__(self, columns: Any) -> None:
        super().__init__()
        self.city = nn.Embedding(columns["city"].size, 2)
        self.words = nn.Embedding(columns["review"].size, 3)
        self.head = nn.Linear(columns.num_numbers + 9, columns.num_classes)

    def forward(self, numbers: Any, city: Any, review: Any, review_mask: Any, spent: Any, spent_mask: Any) -> Any:
        words = (self.words(review) * review_mask[..., None]).sum(1)
        return self.head(torch.cat([numbers, self.city(city), words, spent * spent_mask], dim=1))


def recipe_in(folder: Path) -> Recipe:
    def model(columns: Any) -> nn.Module:
        torch.manual_seed(0)
        return Model(columns)

    return load_recipe({
        "name": "income", "model": model, "columns": DECLARED, "loss": nn.CrossEntropyLoss(),
        "dataset": lambda mode: str(folder / f"{mode}.parquet"),
        "optimizer": lambda params: torch.optim.SGD(params, 0.1),
    })  # fmt: skip
