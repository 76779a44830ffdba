"""The model whose parameters count their records, with the other halves of a fair comparison: data, batch, witness.

`seen[i]` grows by one for each applied step with record i: the loss has the term -mean(seen[ids]), so the gradient of
a mean over n records is -1/n for each, and SGD with the learning rate n makes that +1. So the parameters testify,
whatever the system that trains them says. A recipe of Trueline too. COUNTING_RECORDS and COUNTING_BATCH size it.
"""

import json
import os
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

name = "counting"
RECORDS = int(os.environ.get("COUNTING_RECORDS", "14400"))
WORKERS = 3
global_batch = int(os.environ.get("COUNTING_BATCH", "96"))
"""Records of a step of all workers together."""


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
        wide = 400
        self.classify = torch.nn.Sequential(
            torch.nn.Linear(64, wide),
            torch.nn.ReLU(),
            torch.nn.Linear(wide, wide),
            torch.nn.ReLU(),
            torch.nn.Linear(wide, 10),
        )
        self.seen = torch.nn.Parameter(torch.zeros(RECORDS))

    def forward(self, inputs, ids):
        return self.classify(inputs), self.seen[ids]


def model():
    return Counting()


def loss(outputs, labels):
    logits, seen = outputs
    return cross_entropy(logits, labels) - seen.mean()


def optimizer(params):
    *weights, seen = sorted(params, key=lambda parameter: parameter.dim() == 1 and parameter.numel() == RECORDS)
    return torch.optim.SGD([{"params": weights, "lr": 0.05}, {"params": [seen], "lr": float(global_batch)}])


def dataset(mode):
    return Generated()


class Witness:
    """Writes `rank pid step monotonic_ns` for each applied step, and at the end how often each record was applied."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.log = (folder / "steps.log").open("a", buffering=1)

    def applied(self, step: int) -> None:
        self.log.write(f"{self.rank} {os.getpid()} {step} {time.monotonic_ns()}\n")

    def testify(self, model: Counting) -> None:
        counts = model.seen.detach().round().to(torch.int64).tolist()
        file = self.folder / f"seen.{self.rank}.new"
        file.write_text(json.dumps(counts))
        file.replace(self.folder / f"seen.{self.rank}.json")
