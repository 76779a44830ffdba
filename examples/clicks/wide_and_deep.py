"""Wide and deep: a weight of each category's value, and a network over their rows. Source: Cheng et al., 2016.

    python examples/clicks/make.py
    trueline train examples/clicks/wide_and_deep.py --strategy ps --servers 2 --workers 3

The tables have no vocabulary: a row comes into being when its id is trained for the first time.
"""

import os
from pathlib import Path

import torch
from torch import nn

import trueline
from trueline.data.loading.tensors import tensor

name = "wide-and-deep"
epochs = 1
global_batch = 1024
shuffle = "windows"  # row groups, and records in windows of them: Parquet is decoded once
FIELDS, NUMBERS, DIM = 26, 4, 16
DATA = Path(os.environ.get("CLICKS", Path(__file__).with_name("data")))  # where make.py wrote


class WideAndDeep(nn.Module):
    def __init__(self, wide, deep):
        """`wide` makes one number of each id, `deep` makes DIM of them."""
        super().__init__()
        self.wide, self.deep = wide, deep
        self.network = nn.Sequential(
            nn.Linear(FIELDS * DIM + NUMBERS, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids, numbers):
        rows = self.deep(ids).flatten(1)
        wide = self.wide(ids).sum(dim=1)
        return (self.network(torch.cat([rows, numbers], dim=1)) + wide).squeeze(1)


def model():
    return WideAndDeep(trueline.Embedding(1, init="zeros"), trueline.Embedding(DIM))


def loss(outputs, labels):
    return nn.functional.binary_cross_entropy_with_logits(outputs, labels)


def optimizer(params):
    return torch.optim.Adagrad(params, lr=0.02)


def dataset(mode):
    return DATA / f"{'training' if mode == 'training' else 'evaluation'}.parquet"


def feed(records, mode):
    """An id is the number of its field and the value: each field has ids of its own in one table."""
    ids = tensor(records["ids"]).long() + (torch.arange(FIELDS) << 32)
    return {"ids": ids, "numbers": tensor(records["numbers"])}, tensor(records["label"])


def metrics():
    return {"accuracy": lambda outputs, labels: ((outputs > 0).float() == labels).float()}
