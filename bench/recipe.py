"""The model that the training benchmarks share: an MLP on generated records, in two sizes.

BENCH_STEP=short: 0.2 million parameters, 4 to 8 ms a step on two cores; long: 2.1 million, about 100 ms. BENCH_FACTOR:
of the records of a step, for a step of a certain time on any machine.
Workers read the variable; the launcher loads a recipe once, so `global_batch` is passed to it separately.
"""

import os

import torch
from torch.utils.data import Dataset

from _turns import baton

name = "bench"
SIZES = {"short": (192, 200, 400, 1), "long": (1280, 60, 1000, 2)}
"""Records of a step, steps of an epoch, width and number of the hidden layers."""
records, STEPS, WIDE, DEPTH = SIZES[os.environ.get("BENCH_STEP", "short")]
global_batch = 2 * round(records / 2 * float(os.environ.get("BENCH_FACTOR", "1")))
RECORDS = STEPS * global_batch


class Generated(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(RECORDS, 64, generator=generator)
        self.labels = torch.randint(0, 10, (RECORDS,), generator=generator)

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


def model():
    hidden = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDE, WIDE), torch.nn.ReLU())]
    return torch.nn.Sequential(torch.nn.Linear(64, WIDE), torch.nn.ReLU(), *hidden, torch.nn.Linear(WIDE, 10))


def loss(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs, labels)


turn = baton()  # no attribute of the optimizer: those are the same in all workers


class Adam(torch.optim.Adam):
    """Passes the turn to the other job of a comparison."""

    def step(self, closure=None):
        super().step(closure)
        if turn is not None:
            turn.after_step()


def optimizer(params):
    return Adam(params, lr=1e-3)


def dataset(mode):
    return Generated()
