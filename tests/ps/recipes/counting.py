"""Records with an id each; the table `seen` counts how often each was applied: with SGD, a learning rate of 1 and a
gradient of -1 for each record, its row grows by one."""

import os

import torch
from gate import scheduler
from torch.utils.data import Dataset

import trueline

__all__ = ["Counting", "dataset", "global_batch", "loss", "model", "optimizer", "scheduler"]

name = "counting"
epochs = 2
global_batch = 16
RECORDS = int(os.environ.get("PS_RECORDS", "640"))
ITEMS = 40


class Generated(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.items = torch.randint(-ITEMS, ITEMS, (RECORDS, 3), generator=generator)
        self.labels = (self.items.sum(1) > 0).float()

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return (self.items[index], torch.tensor(index)), self.labels[index]


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items = trueline.Embedding(4, name="items")
        self.seen = trueline.Embedding(1, name="seen", init="zeros")
        self.classify = torch.nn.Linear(12, 1)

    def forward(self, items, ids):
        return self.classify(self.items(items).flatten(1)).squeeze(1), self.seen(ids)


def model():
    return Counting()


def loss(outputs, labels):
    logits, seen = outputs
    own = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return own - seen.sum() + seen.sum().detach()


def optimizer(params):
    params = list(params)
    counting = [one for one in params if one.shape == (0, 1)]  # of the table `seen`
    others = [one for one in params if one.shape != (0, 1)]
    return trueline.JointOptimizer(torch.optim.Adagrad(others, lr=0.05), torch.optim.SGD(counting, lr=1.0))


def dataset(mode):
    return Generated()
