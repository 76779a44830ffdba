"""The models of this folder in one process, with torch's own embedding of a fixed vocabulary and torch's optimizer.

python examples/clicks/one_process.py wide_and_deep

What the parameter servers are compared with: the same records, batches, loss and settings of the optimizer.
"""

import argparse
import importlib
import time

import make
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from wide_and_deep import DATA, DIM, feed


class Vocabulary(nn.Module):
    """Rows for every value of every field: an id is the number of its field and the value."""

    def __init__(self, dim: int, values: int, *, zeros: bool = False) -> None:
        super().__init__()
        sizes = make.sizes_of(values)
        self.register_buffer("starts", torch.from_numpy(np.cumsum(sizes) - sizes))
        self.rows = nn.Embedding(int(sizes.sum()), dim, sparse=True)
        with torch.no_grad():
            self.rows.weight.uniform_(-0.05, 0.05) if not zeros else self.rows.weight.zero_()

    def forward(self, ids):
        return self.rows(self.starts[ids >> 32] + (ids & 0xFFFFFFFF))


def build(name: str, values: int) -> nn.Module:
    recipe = importlib.import_module(name)
    if name == "dlrm":
        return recipe.Dlrm(Vocabulary(DIM, values))
    return recipe.WideAndDeep(Vocabulary(1, values, zeros=True), Vocabulary(DIM, values))


def batches(mode: str, size: int):
    """(inputs, labels) of the records in their order, which says nothing."""
    for table in pq.ParquetFile(DATA / f"{mode}.parquet").iter_batches(batch_size=size):
        yield feed(pa.Table.from_batches([table]), mode)


def measure(model: nn.Module) -> float:
    """The AUC over the records for evaluation."""
    model.eval()
    scores, labels = [], []
    with torch.no_grad():
        for inputs, clicked in batches("evaluation", 8192):
            scores.append(model(**inputs).numpy())
            labels.append(clicked.numpy())
    return make.auc(np.concatenate(scores), np.concatenate(labels))


def train(name: str, values: int) -> nn.Module:
    recipe = importlib.import_module(name)
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until it is told
    model = build(name, values)
    optimizer = recipe.optimizer(model.parameters())
    for inputs, clicked in batches("training", recipe.global_batch):
        optimizer.zero_grad()
        recipe.loss(model(**inputs), clicked).backward()
        optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="wide_and_deep", choices=["wide_and_deep", "dlrm"])
    parser.add_argument("--values", type=int, default=make.VALUES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    model = train(options.recipe, options.values)
    print(f"trained in {time.monotonic() - began:.0f} s; AUC {measure(model):.4f}")


if __name__ == "__main__":
    main()
