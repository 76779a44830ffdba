"""DLRM: the products of the rows of each two categories, and a network over them. Source: Naumov et al., 2019.

    python examples/clicks/make.py
    trueline train examples/clicks/dlrm.py --strategy ps --servers 2 --workers 3

Records, loss and metrics are those of wide_and_deep.py.
"""

import torch
from torch import nn
from wide_and_deep import DIM, FIELDS, NUMBERS, dataset, feed, loss, metrics, optimizer

import trueline

__all__ = ["dataset", "feed", "loss", "metrics", "model", "optimizer"]

name = "dlrm"
epochs = 1
global_batch = 1024
shuffle = "windows"


class Dlrm(nn.Module):
    def __init__(self, table):
        """`table` makes DIM numbers of each id."""
        super().__init__()
        self.table = table
        self.below = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        pairs = (FIELDS + 1) * FIELDS // 2
        self.above = nn.Sequential(nn.Linear(DIM + pairs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.last = nn.Linear(32, 1)
        self.register_buffer("pairs", torch.triu_indices(FIELDS + 1, FIELDS + 1, 1), persistent=False)

    def forward(self, ids, numbers):
        dense = self.below(numbers)
        rows = torch.cat([dense.unsqueeze(1), self.table(ids)], dim=1)
        products = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.last(self.above(torch.cat([dense, products], dim=1))).squeeze(1)


def model():
    return Dlrm(trueline.Embedding(DIM))
