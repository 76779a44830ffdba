"""What usually depends on who trains what: batch normalization, dropout, augmentation by three generators."""

import os
import random

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

name = "lively"
epochs = 3
global_batch = 24
RECORDS = 100


class Augmented(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(RECORDS, 6, generator=generator)
        self.labels = (self.inputs[:, 0] > 0).long()

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        noise = torch.rand(6) * 0.1 + np.random.rand() * 0.1
        return self.inputs[index] * random.choice([-1.0, 1.0]) + noise, self.labels[index]


class Lively(torch.nn.Module):
    def __init__(self):
        super().__init__()
        norm = torch.nn.SyncBatchNorm if os.environ.get("LIVELY_SYNCED") else torch.nn.BatchNorm1d
        self.first = torch.nn.Sequential(torch.nn.Linear(6, 16, bias=False), norm(16), torch.nn.ReLU())
        self.rest = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(16, 2))

    def forward(self, inputs):
        hidden = self.first(inputs)
        if how := os.environ.get("LIVELY_CHECKPOINTED"):
            return checkpoint(self.rest, hidden, use_reentrant=how == "reentrant")
        return self.rest(hidden)


def model():
    return Lively()


def loss(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs, labels) * float(os.environ.get("LIVELY_LOUD", 1))


def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)


def metrics():
    return {"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels).float()}


def dataset(mode):
    return Augmented()
