"""Tables as users have them, and columns fitted to them in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from trueline.columns import Category, Label, Number, Text
from trueline.columns.declared import Declared
from trueline.columns.fit import fit
from trueline.columns.fitted import FittedColumns


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
    return pa.table({"age": ages, "visits": visits, "city": cities, "review": words, "income": labels})


DECLARED: dict[str, Declared] = {
    "age": Number(missing="mean"),
    "visits": Number(missing="median", scale="minmax", indicator=True),
    "city": Category(),
    "review": Text(max_length=4),
    "income": Label(),
}
