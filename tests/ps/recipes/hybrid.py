"""As counting.py, for steps that workers share: a row of `seen` grows by one for each record of a step's mean."""

import torch
from counting import Counting, dataset, global_batch, optimizer, scheduler

__all__ = ["dataset", "loss", "model", "optimizer", "scheduler"]

name = "hybrid"
epochs = 2
global_batch = global_batch


def model():
    return Counting()


def loss(outputs, labels):
    logits, seen = outputs
    own = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return own - global_batch * (seen.mean() - seen.mean().detach())
