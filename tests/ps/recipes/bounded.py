"""As counting.py, with a table that admits an id at its second time, and has room for half of the ids."""

import torch
from counting import Counting, dataset, epochs, global_batch, loss, optimizer, scheduler

import trueline

__all__ = ["dataset", "epochs", "global_batch", "loss", "model", "optimizer", "scheduler"]

name = "bounded"
MAX_ROWS = 40


class Bounded(Counting):
    def __init__(self):
        super().__init__()
        self.items = trueline.Embedding(4, name="items", admit_after=1, max_rows=MAX_ROWS, evict="lru")
        self.classify = torch.nn.Linear(12, 1)


def model():
    return Bounded()
