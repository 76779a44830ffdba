"""The recipe that `trueline init` writes: it trains as it is, and the user changes one blank after the other.

With scikit-learn installed it learns handwritten digits, else two rings of generated points. The choice is made when
the file is written, so that the recipe itself has no hidden switch.
"""

import importlib.util
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from trueline import files
from trueline.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

_HEAD = '''"""{title}

Fill in the blanks: model, loss, optimizer and dataset are required. Try it with

    trueline train {where}
"""

import torch
{imports}from torch import nn
from torch.utils.data import TensorDataset

name = "{name}"
epochs = {epochs}
global_batch = 64  # records of one optimizer step, however many workers share them
seed = 0  # decides the order of the records and the first weights

# More values; flags of `trueline train` win over them. Remove the comment signs of what you need.
# micro_batch = 8  # records of one forward; gradients are accumulated
# readers = 2  # processes of each worker that read the data set ahead, for records that take time to decode
# precision = "bf16"  # or "fp16": autocast of forward and loss
# clip_norm = 1.0  # largest norm of all gradients of a step together
# ema = 0.99  # averages the weights over some 100 steps; the average is what is evaluated and captured
# compile = True  # torch.compile
# monitor = "-accuracy"  # evaluates meanwhile, and the best checkpoint stands for the job; "-": larger is better
# evaluate_every = 50  # steps; at the end of each epoch when it is left out
# patience = 3  # stops after this number of evaluations without a better one


'''

_DIGITS = '''def model():
    """A new, untrained torch.nn.Module. It is called with the inputs of a batch."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def dataset(mode):
    """A map-style Dataset of (inputs, label); mode is "training", "evaluation" or "prediction"."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    indices = order[360:] if mode == "training" else order[:360]  # 360 scans are never trained
    return TensorDataset(images[indices], torch.tensor(digits)[indices])


'''

_RINGS = '''def model():
    """A new, untrained torch.nn.Module. It is called with the inputs of a batch."""
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def dataset(mode):
    """A map-style Dataset of (inputs, label); mode is "training", "evaluation" or "prediction"."""
    random = torch.Generator().manual_seed(0 if mode == "training" else 1)
    count = 1000 if mode == "training" else 200
    labels = torch.randint(0, 2, (count,), generator=random)
    radius = 1.0 + labels + 0.1 * torch.randn(count, generator=random)
    angle = 2 * torch.pi * torch.rand(count, generator=random)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, labels)


'''

_TAIL = '''def loss(outputs, labels):
    """The mean over the records of a batch, or one loss for each record."""
    return nn.functional.cross_entropy(outputs, labels)


def optimizer(params):
    return torch.optim.Adam(params, lr=0.003)


def metrics():
    """What `trueline evaluate` reports: one value for each record, or the mean of them."""
    return {"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels).float()}


# Optional blanks. Remove the comment signs of what you need.
#
# def scheduler(optimizer):
#     """Advanced once for each optimizer step."""
#     return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
#
# def examples():
#     """Inputs to capture and prove with; evaluation records are used when it is left out."""
#     return dataset("evaluation")[:4][0]
#
# Records in Parquet files: let dataset return their path, and turn a table of them into tensors here.
#
# def feed(records, mode):
#     from trueline.data.loading.tensors import tensor
#
#     return tensor(records["x"]), tensor(records["label"])
'''


@dataclass(frozen=True, slots=True)
class WrittenRecipe:
    path: Path
    note: str
    """What it learns."""


TEMPLATES = ("tabular", "text", "images", "own-loop")
_FOLDER = Path(__file__).with_name("templates")
_NOTES = {
    "tabular": "it learns the rent of flats from training.csv, a table with gaps",
    "text": "it learns whether short reviews are good",
    "images": "it learns to tell squares, discs and crosses",
    "own-loop": "a training loop with three elastic lines",
}


def write_recipe(name: str, into: Path) -> WrittenRecipe:
    """Writes `into/name/recipe.py`. Raises UsageError when it exists or the name is not valid, StorageError."""
    path = new_file(name, into, "recipe.py")
    digits = importlib.util.find_spec("sklearn") is not None
    files.write_atomic(path, text(name, where=str(path), digits=digits).encode())
    rings = "two rings of generated points (handwritten digits need `pip install scikit-learn`)"
    return WrittenRecipe(path, f"it learns {'handwritten digits' if digits else rings}")


def write_template(name: str, into: Path, template: str) -> WrittenRecipe:
    """Writes the recipe of `template`, one of TEMPLATES, and its data as the folder `into/name`. Raises as
    `write_recipe` does.
    """
    path = new_file(name, into, "train.py" if template == "own-loop" else "recipe.py")
    source = (_FOLDER / f"{template}.py.txt").read_text()
    for table in sorted((_FOLDER / template).glob("*.csv")):
        files.write_atomic(path.with_name(table.name), table.read_bytes())
    if template == "images":
        with zipfile.ZipFile(_FOLDER / "images.zip") as pictures:
            pictures.extractall(path.parent)
    files.write_atomic(path, source.format(name=name, where=path).encode())
    return WrittenRecipe(path, _NOTES[template])


def new_file(name: str, into: Path, file: str) -> Path:
    """`into/name/file`. Raises UsageError when it exists or the name is not valid."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot name a recipe; use letters, digits and _ . -", hint="for example `trueline init digits`"
        )
    path = into / name / file
    if path.exists():
        raise UsageError(f"{path} exists already and is not overwritten", hint="choose another name")
    return path


def text(name: str, *, where: str, digits: bool) -> str:
    """The recipe's source."""
    head = _HEAD.format(
        title="Handwritten digits, 8x8 pixels, ten classes." if digits else "Points on two rings, two classes.",
        where=where,
        imports="from sklearn.datasets import load_digits\n" if digits else "",
        name=name,
        epochs=10 if digits else 20,
    )
    return head + (_DIGITS if digits else _RINGS) + _TAIL
