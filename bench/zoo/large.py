"""Models of a chosen number of parameters, captured for their cost: processor time, and peak memory over the weights.

`python -m bench.capture --size 100` captures each in a process of its own, with two threads.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

THREADS = 2
SMALL = 300_000
"""Parameters of a model that is captured before."""


class Linear(nn.Sequential):
    """Ten square layers."""

    def __init__(self, parameters: int) -> None:
        width = round((parameters / 10) ** 0.5)
        super().__init__(*(part for _ in range(10) for part in (nn.Linear(width, width), nn.ReLU())))
        self.example = torch.randn(2, width)


class Gated(nn.Sequential):
    """Six square layers with GELU, whose tails ONNX Runtime rounds to 0: its program is refused, and why is found."""

    def __init__(self, parameters: int) -> None:
        width = round((parameters / 6) ** 0.5)
        super().__init__(*(part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())))
        self.example = torch.randn(4, width)


class Attention(nn.Module):
    """Eight encoder layers of width d, 12 d² parameters each."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        width = round((parameters / 96) ** 0.5 / 64) * 64
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.example = torch.randn(2, 16, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


class Convolution(nn.Sequential):
    """Eight 3 × 3 convolutions of equal width on small images."""

    def __init__(self, parameters: int) -> None:
        width = round((parameters / 72) ** 0.5)
        layers = [part for _ in range(8) for part in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
        super().__init__(nn.Conv2d(3, width, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.example = torch.randn(2, 3, 4, 4)


class Tied(nn.Module):
    """A table that is the output layer too."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.table = nn.Embedding(parameters // 512, 512)
        self.body = nn.Linear(512, 512)
        self.example = torch.randint(0, parameters // 512, (2, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.body(self.table(ids))) @ self.table.weight.T


MODELS: dict[str, Any] = {
    "linear": Linear,
    "gated": Gated,
    "attention": Attention,
    "convolution": Convolution,
    "tied": Tied,
}


def measured(name: str, millions: float) -> dict[str, Any]:
    """The record of one model, captured in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.zoo.large", name, str(millions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _capture(name: str, millions: float) -> dict[str, Any]:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    _climb(MODELS[name](SMALL).eval())  # what the exporters and runtimes load
    before = _peak()
    model = MODELS[name](int(millions * 1e6)).eval()
    weights = sum(one.nbytes for one in model.parameters())
    began, cpu = time.monotonic(), time.process_time()
    proven = _climb(model)
    return {
        "model": name,
        "parameters": sum(one.numel() for one in model.parameters()),
        "proven": proven,
        "cpu_s": round(time.process_time() - cpu, 1),
        "wall_s": round(time.monotonic() - began, 1),
        "peak_over_weights": round((_peak() - before) / weights, 2),
        "process_over_weights": round(_peak() / weights, 2),
    }


def _climb(model: nn.Module) -> list[str]:
    """The formats that are proven of the model."""
    from trueline.capture.ladder import climb
    from trueline.capture.model.eager import EagerSession
    from trueline.capture.subject import Subject
    from trueline.runtime.session import USUAL

    with tempfile.TemporaryDirectory() as work:
        rungs = climb(Subject(module=model, eager=EagerSession(model, model.example), data={}), USUAL, Path(work))
    return [rung.attempt.format for rung in rungs if rung.attempt.verdict == "proven"]


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(json.dumps(_capture(sys.argv[1], float(sys.argv[2]))))
