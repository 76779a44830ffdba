"""Does a student with a third of its teacher's parameters learn more from the teacher than from labels alone? For
`bench.compress --only distill`.

The 1,797 digits of scikit-learn, drawn anew for each seed: 300 to train on, 1,497 to evaluate. The teacher is a small
convolutional network, the student has two wide layers and no convolution. Both ways of training the student read the
same records in the same order for as many epochs: the 300 digits, and 20 times as many mixtures of two of them with
labels mixed alike (Zhang et al., mixup, arXiv 1710.09412). Alone it is trained by `trueline train`, taught by
`trueline compress --distill`, by the distance that is the default and by functions of its own recipe, `--distill-loss`.
What is stated is the share of the gap in accuracy between student and teacher that is closed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench._search_time import capture_model

Figures = dict[str, Any]
DISTANCES = {"closed": "", "closed_by_logits": "match_logits", "closed_by_hot_classes": "match_hot_classes"}
"""Key of the figure -> --distill-loss."""
SEEDS = 3
_RECORDS = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

SEED, TIMES = {seed}, {times}
seed, global_batch = SEED, 128


def dataset(mode):
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    labels = functional.one_hot(torch.from_numpy(labels), 10).float()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    chosen = order[:300] if mode == "training" else order[300:]
    images, labels = images[chosen], labels[chosen]
    if mode != "training":
        return TensorDataset(images, labels)
    draw, mixed = torch.Generator().manual_seed(1000 + SEED), [(images, labels)]
    for _ in range(TIMES):
        other, share = torch.randperm(len(images), generator=draw), torch.rand(len(images), 1, generator=draw)
        both = share[:, :, None, None] * images + (1 - share)[:, :, None, None] * images[other]
        mixed.append((both, share * labels + (1 - share) * labels[other]))
    return TensorDataset(*(torch.cat(parts) for parts in zip(*mixed, strict=True)))


def loss(outputs, labels):
    return functional.cross_entropy(outputs, labels)


def optimizer(params):
    return torch.optim.Adam(params, lr=0.003)


def metrics():
    return {{"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels.argmax(dim=1)).float()}}
"""
_TEACHER = (
    _RECORDS
    + """
name, epochs = "teacher", {epochs}


def model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10),
    )
"""
)
_STUDENT = (
    _RECORDS
    + '''
name, epochs = "student", {epochs}


def model():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 105), nn.ReLU(), nn.Linear(105, 105), nn.ReLU(), nn.Linear(105, 10)
    )


def match_logits(outputs, answers):
    """Squares of logits without their mean, which no softmax sees."""
    outputs, answers = (one - one.mean(dim=1, keepdim=True) for one in (outputs, answers))
    return 5 * (outputs - answers).square().mean(dim=1)


def match_hot_classes(outputs, answers):
    """Hinton's divergence at temperature 8."""
    told, said = (functional.log_softmax(one / 8, dim=1) for one in (answers, outputs))
    return 64 * (told.exp() * (told - said)).sum(dim=1)
'''
)


def measure_distill(quick: bool) -> Figures:
    seeds = range(1 if quick else SEEDS)
    found = [_measure_one(seed, quick) for seed in seeds]
    figures: Figures = {"distill_seeds": len(found), "distill_parameters": found[0]["parameters"]}
    for name in ("teacher", "alone"):
        figures[f"distill_{name}"] = mean(one[name] for one in found)
    for key in DISTANCES:
        figures |= _describe(key, [(one["teacher"], one["alone"], one[key]) for one in found])
    return figures


def _describe(key: str, rows: list[tuple[float, float, float]]) -> Figures:
    """The share of the mean gap that is closed on average, and its spread over the seeds."""
    shares = [(taught - alone) / (teacher - alone) for teacher, alone, taught in rows]
    gap, gained = (mean(row[0] - row[1] for row in rows), mean(row[2] - row[1] for row in rows))
    return {
        f"distill_{key}": gained / gap, f"distill_{key}_least": min(shares), f"distill_{key}_most": max(shares),
        f"distill_{key}_spread": stdev(shares) if len(shares) > 1 else 0.0,
        f"distill_{key}_accuracy": mean(row[2] for row in rows),
    }  # fmt: skip


def _measure_one(seed: int, quick: bool) -> Figures:
    """Accuracies of the teacher, of the student alone, and of the student as each distance teaches it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "student").mkdir()
        (folder / "teacher.py").write_text(_TEACHER.format(seed=seed, times=0, epochs=2 if quick else 40))
        student = folder / "student" / "recipe.py"
        student.write_text(_STUDENT.format(seed=seed, times=2 if quick else 20, epochs=1 if quick else 20))
        teacher = _train_teacher(folder)
        _run(["train", "student/recipe.py", "--workers", "1", "--job", "alone"], folder)
        found = {"alone": _evaluate(student, folder / "alone"), "parameters": _share_parameters(folder)}
        for key, name in list(DISTANCES.items())[: 1 if quick else None]:
            words = ["compress", str(teacher), "--recipe", "teacher.py", "--distill", "student/recipe.py"]
            words += ["-o", f"{key}.bundle", "--json", "-q", *(["--distill-loss", name] if name else [])]
            told = json.loads(_run(words, folder))
            found["teacher"] = told["parent_value"]
            found[key] = next(row["metric"] for row in told["candidates"] if row["name"] == told["chosen"])
        for key in DISTANCES:
            found.setdefault(key, found["closed"])
        told = ", ".join(f"{key} {value:.4f}" for key, value in found.items())
        print(f"  seed {seed}: {told}", flush=True)
        return found


def _train_teacher(folder: Path) -> Path:
    """The bundle of the trained teacher. How it was trained is not what is measured."""
    import torch

    import trueline

    recipe = trueline.load_recipe(folder / "teacher.py")
    torch.manual_seed(recipe.defaults.seed)
    model, data = recipe.model(), recipe.dataset("training")
    optimizer = recipe.optimizer(model.parameters())
    for _ in range(recipe.defaults.epochs):
        for chosen in torch.randperm(len(data)).split(32):
            inputs, labels = data[chosen]
            optimizer.zero_grad()
            recipe.loss(model(inputs), labels).backward()
            optimizer.step()
    return capture_model(recipe, model, folder / "teacher.bundle")


def _run(words: list[str], folder: Path) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "trueline", *words]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, env={**os.environ}, text=True, check=True)
    return done.stdout


def _evaluate(recipe: Path, job: Path) -> float:
    """The accuracy of the newest checkpoint of `job`."""
    import torch

    import trueline
    from trueline.checkpoint.checkpoint import load_model

    loaded = trueline.load_recipe(recipe)
    newest = max((job / "checkpoints").glob("step-*"))
    model = load_model(loaded, newest).eval()
    inputs, labels = loaded.dataset("evaluation").tensors
    with torch.no_grad():
        return float(loaded.metrics()["accuracy"](model(inputs), labels).mean())


def _share_parameters(folder: Path) -> float:
    import trueline

    sizes = [
        sum(one.numel() for one in trueline.load_recipe(file).model().parameters())
        for file in (folder / "student" / "recipe.py", folder / "teacher.py")
    ]
    return sizes[0] / sizes[1]
