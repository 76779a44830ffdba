"""Writes a click log: records with 26 categories and 4 numbers each, and whether the advertisement was clicked.

python examples/clicks/make.py                         2 million records in examples/clicks/data, about 200 MB
python examples/clicks/make.py --records 20000 --out /tmp/clicks

The categories have a million values in all, as frequent as words (Zipf): of most there are a few records only, so what
a model knows of them is in rows that are seldom touched. A click depends on a weight of each value, on pairs of
values, and on chance: the best that any model can reach is printed.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FIELDS = 26
NUMBERS = 4
VALUES = 1_000_000  # of all fields together
GROUP = 16_384  # records of a row group
PAIRS = ((0, 5), (3, 9), (7, 20), (12, 25))  # fields whose values count together


def sizes_of(values: int) -> np.ndarray:
    """How many values each field has: few of the first, most of the last."""
    shares = 1.6 ** np.arange(FIELDS)
    return np.maximum(8, shares / shares.sum() * values).astype(np.int64)


def scores_of(*parts: np.ndarray) -> np.ndarray:
    """A number with mean 0 and variance 1 that is drawn by whole numbers: the finalizer of splitmix64."""
    mixed = np.zeros(parts[0].shape, dtype=np.uint64)
    for part in parts:
        mixed = (mixed ^ part.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed.astype(np.float64) / 2.0**64 - 0.5) * 12**0.5


def draw(count: int, values: int, random: np.random.Generator) -> tuple[pa.Table, np.ndarray]:
    """A table of `count` records, and the probability of each click."""
    sizes = sizes_of(values)
    ids = np.minimum(np.exp(random.random((count, FIELDS)) * np.log(sizes)), sizes - 1).astype(np.int32)
    numbers = random.standard_normal((count, NUMBERS), dtype=np.float32)
    logits = -1.2 + 0.4 * numbers[:, 0] - 0.3 * np.abs(numbers[:, 1]) + 0.3 * numbers[:, 2] * numbers[:, 3]
    for field in range(FIELDS):
        logits += 0.25 * scores_of(ids[:, field], np.full(count, field))
    for one, other in PAIRS:
        logits += 0.35 * scores_of(ids[:, one] % 16) * scores_of(ids[:, other] % 16)
    chance = 1 / (1 + np.exp(-logits))
    clicked = (random.random(count) < chance).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays
    columns = {"ids": lists(ids.reshape(-1), FIELDS), "numbers": lists(numbers.reshape(-1), NUMBERS), "label": clicked}
    return pa.table(columns), chance


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """How often a clicked record has a higher score than one that was not clicked."""
    _, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[where]
    positive = labels > 0.5
    wins = ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2
    return float(wins / (positive.sum() * (~positive).sum()))


def write(folder: Path, records: int, values: int = VALUES, seed: int = 0) -> float:
    """Writes `training.parquet`, and a twentieth as many records to `evaluation.parquet`; returns the best AUC."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    best = 0.0
    for name, count in (("training", records), ("evaluation", max(1000, records // 20))):
        partial = folder / f"{name}.parquet.part"
        chances, labels = [], []
        with pq.ParquetWriter(partial, draw(1, values, random)[0].schema) as file:
            for start in range(0, count, 8 * GROUP):
                table, chance = draw(min(8 * GROUP, count - start), values, random)
                file.write_table(table, row_group_size=GROUP)
                chances.append(chance)
                labels.append(table["label"].to_numpy())
        partial.rename(folder / f"{name}.parquet")
        best = auc(np.concatenate(chances), np.concatenate(labels))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--values", type=int, default=VALUES)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("data"))
    options = parser.parse_args()
    best = write(options.out, options.records, options.values)
    print(f"{options.records} records in {options.out}; the best AUC that a model can reach is {best:.4f}")


if __name__ == "__main__":
    main()
