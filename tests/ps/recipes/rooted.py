"""As counting.py, with gradients of rows that are NaN: of a root at zero, times zero."""

import torch
from counting import Counting, dataset, epochs, global_batch, loss, optimizer, scheduler

__all__ = ["dataset", "epochs", "global_batch", "loss", "model", "optimizer", "scheduler"]

name = "rooted"


class Rooted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Counting()

    def forward(self, items, ids):
        logits, seen = self.inner(items, ids)
        rows = self.inner.items(items)
        return logits + 0 * torch.sqrt(rows - rows.detach()).sum((1, 2)), seen


def model():
    return Rooted()
