"""A digits job whose own parameters count the records: `seen[i]` grows by one for each applied step with record i.

The counter is a parameter of the model with an optimizer of its own, so it testifies outside Trueline's ledger: the
loss has the term -mean(seen[ids]), whose gradient is -1/80 for each record of a step of 80, and SGD with the learning
rate 80 makes that +1. Double precision, so that two runs can be compared closely.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

name = "counting"
epochs = 40
global_batch = 80
RECORDS = 1440


class Digits(Dataset):
    def __init__(self):
        scans, labels = load_digits(return_X_y=True)
        self.scans = torch.from_numpy(scans[:RECORDS] / 16.0)
        self.labels = torch.from_numpy(labels[:RECORDS])

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return (self.scans[index], index), self.labels[index]


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.classify = torch.nn.Sequential(
            torch.nn.Linear(64, 96, dtype=torch.float64), torch.nn.ReLU(), torch.nn.Linear(96, 10, dtype=torch.float64)
        )
        self.seen = torch.nn.Parameter(torch.zeros(RECORDS, dtype=torch.float64))

    def forward(self, scans, ids):
        return self.classify(scans), self.seen[ids]


def model():
    return Counting()


def loss(outputs, labels):
    logits, seen = outputs
    return torch.nn.functional.cross_entropy(logits, labels) - seen.mean()


def optimizer(params):
    *weights, seen = sorted(params, key=lambda parameter: parameter.numel() == RECORDS)
    return torch.optim.SGD([{"params": weights, "lr": 0.05, "momentum": 0.9}, {"params": [seen], "lr": 80.0}])


def dataset(mode):
    return Digits()
