"""How long does the whole search of a ResNet-18 take until it has 95 % of the speed that it ends with? For
`bench.compress --only search`.

`trueline compress --budget accuracy=1% --target latency` in a process of its own, on a ResNet-18 of 11 million
parameters (written here) that was trained for some steps on generated images of 224 x 224. Whatever stands in the rows
of the search when a row appears was known then; speeds are those that are measured at the end, all together. Time runs
from the start of the command.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
ENOUGH = 0.95
RECIPE = '''
import torch
from torch import nn
from torch.utils.data import Dataset

name, epochs = "resnet18", 1
SIDE, RECORDS = {side}, {{"training": {training}, "evaluation": {evaluation}, "prediction": 8}}


class Basic(nn.Module):
    """He et al., arXiv 1512.03385."""

    def __init__(self, inside, width, stride):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inside, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )
        same = stride == 1 and inside == width
        self.skip = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(inside, width, 1, stride, bias=False), nn.BatchNorm2d(width)
        )

    def forward(self, x):
        return torch.relu(self.path(x) + self.skip(x))


def model():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for width in (64, 128, 256, 512):
        layers += [Basic(inside, width, 1 if width == 64 else 2), Basic(width, width, 1)]
        inside = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)


def optimizer(params):
    return torch.optim.Adam(params, lr=0.001)


class Drawn(Dataset):
    """Ten patterns of coarse color, each image with noise of its own; made when they are read."""

    def __init__(self, mode):
        draw = torch.Generator().manual_seed(7)
        self.patterns = nn.functional.interpolate(torch.rand(10, 3, 7, 7, generator=draw), SIDE, mode="bilinear")
        self.first, self.count = 1_000_000 * len(mode), RECORDS[mode]

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        draw = torch.Generator().manual_seed(self.first + at)
        label = int(torch.randint(0, 10, (), generator=draw))
        return self.patterns[label] + 0.4 * torch.randn(3, SIDE, SIDE, generator=draw), label


def dataset(mode):
    return Drawn(mode)


def metrics():
    return {{"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels).float()}}
'''


def measure_search(quick: bool) -> Figures:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        bundle = _make_bundle(folder, quick)
        rows = folder / f"{bundle.stem}-latency.bundle.search" / "rows.jsonl"
        words = ["--budget", "accuracy=1%", "--target", "latency", "--minutes", "2" if quick else "15", "--json", "-q"]
        command = [sys.executable, "-W", "ignore", "-m", "trueline", "compress", str(bundle), *words]
        began = time.monotonic()
        search = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        seen: list[tuple[float, str]] = []
        while search.poll() is None:
            lines = rows.read_bytes().splitlines() if rows.is_file() else []
            seen += [(time.monotonic() - began, json.loads(line)["name"]) for line in lines[len(seen) :]]
            time.sleep(0.1)
        took = time.monotonic() - began
        told = search.stdout.read() if search.stdout is not None else ""
        if search.returncode:
            raise RuntimeError(f"the search ended with {search.returncode}")
        return describe(json.loads(told), seen, took)


def describe(told: dict[str, Any], seen: list[tuple[float, str]], took: float) -> Figures:
    """When the first candidate was known that is nearly as fast as the one that was chosen."""
    offered = [row for row in told["candidates"] if row["verdict"] == "offered" and row.get("vs_fp32")]
    speeds = {row["name"]: row["vs_fp32"]["1"] for row in offered}
    best = speeds[told["chosen"]]
    for seconds, name in seen:
        print(f"  {seconds / 60:.2f} min: {name}, {speeds.get(name, 0.0):.2f} x parent")
    first = next(seconds for seconds, name in seen if speeds.get(name, 0.0) >= ENOUGH * best)
    chosen = next(row for row in told["candidates"] if row["name"] == told["chosen"])
    return {
        "search_minutes_to_95": first / 60, "search_minutes": took / 60, "search_candidates": len(seen),
        "search_chosen": told["chosen"], "search_vs_fp32": best, "search_vs_eager": chosen["vs_eager"]["1"],
        "search_loss": chosen["loss"], "search_loss_bound": chosen["loss_high"],
        "search_accuracy": told["parent_value"], "search_count": told["evaluation_records"],
    }  # fmt: skip


def _make_bundle(folder: Path, quick: bool) -> Path:
    import torch
    from torch.utils.data import DataLoader

    import trueline

    side, training, evaluation = (64, 640, 400) if quick else (224, 640, 600)
    file = folder / "recipe.py"
    file.write_text(RECIPE.format(side=side, training=training, evaluation=evaluation))
    recipe = trueline.load_recipe(file)
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    for inputs, labels in DataLoader(recipe.dataset("training"), 16, shuffle=True):
        optimizer.zero_grad()
        recipe.loss(model(inputs), labels).backward()
        optimizer.step()
    return capture_model(recipe, model, folder / "resnet18.bundle")


def capture_model(recipe: Any, model: Any, out: Path) -> Path:
    """`out`, a bundle of `model` as it is now, in ONNX."""
    from safetensors.torch import save_file

    import trueline

    weights = out.with_suffix(".safetensors")
    save_file(model.state_dict(), weights)
    trueline.capture(recipe, weights, out, formats=["onnx"])
    return out
