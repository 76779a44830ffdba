"""A model that sleeps instead of computing, as on an accelerator: workers do not compete for a machine's cores.

PACE_MS: milliseconds a record; PACE_SLOW: a worker slot that takes ten times as long; PACE_RECORDS: number of records.
"""

import os
import time

import torch
from torch.utils.data import Dataset

name = "paced"
SLOWER = 10
global_batch = 60
RECORDS = int(os.environ.get("PACE_RECORDS", "6000"))
_SLOT = os.environ.get("TRUELINE_REF", "worker-0.0").partition("-")[2].partition(".")[0]
PACE_S = float(os.environ.get("PACE_MS", "5")) / 1e3 * (SLOWER if os.environ.get("PACE_SLOW") == _SLOT else 1)


class Zeros(Dataset):
    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return torch.zeros(4), torch.zeros(1)


class Paced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, inputs):
        time.sleep(len(inputs) * PACE_S)  # this is the compute
        return self.linear(inputs)


def model():
    return Paced()


def loss(outputs, labels):
    return torch.nn.functional.mse_loss(outputs, labels)


def optimizer(params):
    return torch.optim.SGD(params, lr=0.01)


def dataset(mode):
    return Zeros()
