"""An MLP of BENCH_SIZE million parameters with Adam, on distinct records that its own parameter counts.

`seen[i]` grows by one for each applied step with record i: the loss has the term -mean(seen[ids]), whose gradient is
-1/B in a step of B records, and Adam without momentum and with an epsilon far above that gradient moves by
lr * gradient / epsilon. So `seen` stays in the one optimizer that the job has. BENCH_STEPS: steps of an epoch.
"""

import os

import torch
from torch.utils.data import Dataset

from _turns import baton

name = "sized"
SIZES = {2: (1000, 2, 960), 60: (2440, 10, 64), 300: (5000, 12, 32)}
"""Million parameters -> width and number of the hidden layers, records of a step."""
WIDE, DEPTH, global_batch = SIZES[int(os.environ.get("BENCH_SIZE", "2"))]
STEPS = int(os.environ.get("BENCH_STEPS", "40"))
RECORDS = STEPS * global_batch
EPSILON = 1e6


class Generated(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(RECORDS, 64, generator=generator)
        self.labels = torch.randint(0, 10, (RECORDS,), generator=generator)

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return (self.inputs[index], index), self.labels[index]


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        hidden = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDE, WIDE), torch.nn.ReLU())]
        self.classify = torch.nn.Sequential(
            torch.nn.Linear(64, WIDE), torch.nn.ReLU(), *hidden, torch.nn.Linear(WIDE, 10)
        )
        self.seen = torch.nn.Parameter(torch.zeros(RECORDS))

    def forward(self, inputs, ids):
        return self.classify(inputs), self.seen[ids]


def model():
    return Counting()


def loss(outputs, labels):
    logits, seen = outputs
    return torch.nn.functional.cross_entropy(logits, labels) - seen.mean()


class InTurns(torch.optim.Adam):
    """Passes the turn to the other job of a comparison."""

    def step(self, closure=None):
        super().step(closure)
        turn.after_step()


turn = baton()


def optimizer(params):
    *weights, seen = sorted(params, key=lambda parameter: parameter.shape == (RECORDS,))
    counting = {"params": [seen], "lr": global_batch * EPSILON, "betas": (0.0, 0.0), "eps": EPSILON}
    kind = torch.optim.Adam if turn is None else InTurns
    return kind([{"params": weights, "lr": 1e-4}, counting])


def dataset(mode):
    return Generated()
