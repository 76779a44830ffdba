"""The model that the training benchmarks share: an MLP of 1.1 million parameters on generated records."""

import torch
from torch.utils.data import Dataset

name = "bench"
global_batch = 384
RECORDS = 38400


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
    wide = 1000
    return torch.nn.Sequential(
        torch.nn.Linear(64, wide),
        torch.nn.ReLU(),
        torch.nn.Linear(wide, wide),
        torch.nn.ReLU(),
        torch.nn.Linear(wide, 10),
    )


def loss(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs, labels)


def optimizer(params):
    return torch.optim.Adam(params, lr=1e-3)


def dataset(mode):
    return Generated()
