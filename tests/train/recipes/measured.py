"""Records whose reading or computing can be told to fail: MEASURED_TROUBLE is `how:record[:marker]`.

How: raise, die, hang. With a marker file it happens once, to whoever makes the file.
MEASURED_PRISON is `folder:record,record`: a worker that reads one of these writes its process id into the file RECORD
of the folder and stays until there is a file RECORD.killed. So a test can kill it in the middle of its work.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

RECORDS = 333


class Troubled(Dataset):
    def __init__(self):
        self.inputs = torch.randn(RECORDS, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        if os.environ.get("MEASURED_SLOW_S"):
            time.sleep(float(os.environ["MEASURED_SLOW_S"]))  # so that somebody else has time to kill
        if os.environ.get("MEASURED_PRISON"):
            wait_to_be_killed(index)
        trouble(index)
        return self.inputs[index], self.inputs[index].sum()


def wait_to_be_killed(index):
    folder, _, records = os.environ["MEASURED_PRISON"].rpartition(":")
    if str(index) in records.split(","):
        written = Path(folder, f"{index}.{os.getpid()}")
        written.write_text(str(os.getpid()))
        written.replace(Path(folder, str(index)))
        while not Path(folder, f"{index}.killed").exists():
            time.sleep(0.005)


def trouble(index):
    how, _, rest = os.environ.get("MEASURED_TROUBLE", "").partition(":")
    record, _, marker = rest.partition(":")
    if not how or index != int(record):
        return
    if marker:
        try:
            Path(marker).touch(exist_ok=False)
        except FileExistsError:
            return
    if how == "raise":
        raise ValueError("an odd record")
    os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)[:, 0]


def model():
    return Model()


def loss(outputs, labels):
    return torch.nn.functional.mse_loss(outputs, labels)


def metrics():
    return {
        "absolute": lambda outputs, labels: (outputs - labels).abs(),
        "mean": lambda outputs, labels: (outputs - labels).mean(),
    }


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)


def dataset(mode):
    return Troubled()
