"""`tiny` with enough parameters that its state is streamed to joiners instead of broadcast."""

import importlib.util
from pathlib import Path

import torch

_tiny = importlib.util.spec_from_file_location("tiny", Path(__file__).parent / "tiny.py")
tiny = importlib.util.module_from_spec(_tiny)
_tiny.loader.exec_module(tiny)

name = "large"
epochs = 6
global_batch = 30


class Large(tiny.Counting):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Sequential(torch.nn.Linear(8, 2000), torch.nn.Linear(2000, 800)).double()

    def forward(self, inputs, ids):
        logits, seen = super().forward(inputs, ids)
        return logits + self.wide(inputs).mean(dim=1, keepdim=True), seen


def model():
    return Large()


loss, dataset = tiny.loss, tiny.dataset


def optimizer(params):
    *weights, seen = sorted(params, key=lambda parameter: parameter.numel() == tiny.RECORDS)
    return torch.optim.SGD(
        [{"params": weights, "lr": 0.01, "momentum": 0.9}, {"params": [seen], "lr": float(global_batch), "momentum": 0}]
    )
