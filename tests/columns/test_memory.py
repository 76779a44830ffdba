"""A million records are fitted and checked in memory that does not grow with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PIECES = """
import resource, sys
import numpy as np
import pyarrow as pa

WORDS = np.array([f"word{number}" for number in range(500)])

def piece(seed, with_text, rows=50_000):
    draw = np.random.default_rng(seed)
    columns = {"age": draw.normal(40, 9, rows), "city": WORDS[draw.integers(0, 50, rows)],
               "left": draw.integers(0, 2, rows)}
    if with_text:
        columns["note"] = [" ".join(words) for words in WORDS[draw.integers(0, 500, (rows, 3))]]
    return pa.table(columns)

def peak_mb():
    # of the process with the files that it maps, and of tables
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, pa.default_memory_pool().max_memory() // 2**20
"""
FIT = """
from trueline.columns import Category, Label, Number
from trueline.columns.fit import fit

declared = {"age": Number(missing="median"), "city": Category(), "left": Label()}
for pieces in (2, 20):
    tables = lambda names: (piece(seed, False).select(names) for seed in range(pieces))
    fitted = fit(declared, tables, piece(0, False).schema)
    assert fitted.records == pieces * 50_000
    print(*peak_mb())
"""
CHECK = """
import pyarrow.parquet as pq
from torch import nn, optim
from trueline.batch.check import check
from trueline.columns import Category, Label, Number, Text
from trueline.recipe.load import load_recipe

class Model(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.words, self.head = nn.Embedding(columns["note"].size, 2), nn.Linear(3, 2)
    def forward(self, numbers, city, note, note_mask):
        import torch
        return self.head(torch.cat([numbers, self.words(note).mean(1)], 1))

for pieces in (5, 20):
    with pq.ParquetWriter("table.parquet", piece(0, True).schema) as writer:
        for seed in range(pieces):
            writer.write_table(piece(seed, True))
    recipe = load_recipe({
        "name": "large", "model": Model, "dataset": lambda mode: "table.parquet", "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: optim.SGD(params, 0.1),
        "columns": {"age": Number(), "city": Category(), "note": Text(max_length=4), "left": Label()},
    })
    report = check(recipe)
    assert report.records["training"] == pieces * 50_000 and report.sound, report.as_text()
    print(*peak_mb())
"""


def peaks_of(code: str, folder: Path) -> list[int]:
    (folder / "script.py").write_text(PIECES + code)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=folder)
    assert not done.returncode, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_fitting_a_million_records_takes_no_more_memory_than_a_hundred_thousand(tmp_path: Path) -> None:
    few, tables_of_few, many, tables_of_many = peaks_of(FIT, tmp_path)
    assert many < few + 24, "the whole table has 30 MB"
    assert tables_of_many <= tables_of_few + 4


@pytest.mark.long
def test_checking_a_million_records_takes_no_more_memory_than_a_quarter_of_them(tmp_path: Path) -> None:
    few, tables_of_few, many, tables_of_many = peaks_of(CHECK, tmp_path)
    assert many < few + 48
    assert tables_of_many <= tables_of_few + 8, "the whole table has 50 MB"
