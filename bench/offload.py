"""How fast is a program in which one operator has no ONNX form? Run: python -m bench.offload [MODEL …] [--threads N]

Each model has an operator that ONNX cannot express, so it has no ONNX program; the other operators are offloaded in
parts and proven against the eager model on the usual probes. Eager, torch.export's program and the offloaded one run
the same request in turns, in one run; the figures are medians of the times. The last line is JSON:
`offload_ratio` is the median over the models of offloaded / eager, `worst` the largest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench._table import report
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.capture.onnx import offload as offload_emit
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove
from trueline.errors import CaptureError
from trueline.runtime import offload
from trueline.runtime.open import open_session
from trueline.runtime.session import Session, SessionSettings

WARM_UP, TURNS = 5, 40


class Cnn(nn.Module):
    """Inverted residuals as in MobileNetV2; channels are weighed by how likely their energy is (incomplete gamma)."""

    def __init__(self, blocks: int = 6, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6())
        self.blocks = nn.ModuleList(self._block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 100)

    @staticmethod
    def _block(width: int) -> nn.Module:
        wide = 6 * width
        return nn.Sequential(
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.stem(image)
        for at, block in enumerate(self.blocks):
            hidden = hidden + block(hidden)
            if at == len(self.blocks) // 2:
                energy = hidden.flatten(2).square().mean(2)
                gate = torch.special.gammainc(torch.ones_like(energy), energy)
                hidden = hidden * gate[:, :, None, None]
        found: Tensor = self.head(hidden.mean((2, 3)))
        return found


class Encoder(nn.Module):
    """Four layers of a transformer; returns the variances of a Dirichlet's log-probabilities."""

    def __init__(self, layers: int = 4, width: int = 256) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        counts = 1 + nn.functional.softplus(self.head(self.layers(tokens).mean(1)))
        return torch.polygamma(1, counts) - torch.polygamma(1, counts.sum(1, keepdim=True))


class Tabular(nn.Module):
    """A deep network over counts, whose probabilities under a Poisson of rate one are features too."""

    def __init__(self, width: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        one = (nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers))
        self.layers = nn.Sequential(*one)
        self.last = nn.Linear(width + 64, 1)

    def forward(self, features: Tensor) -> Tensor:
        counts = 1 + features.abs()
        rare = torch.special.gammainc(counts, torch.ones_like(counts))
        found: Tensor = self.last(torch.cat([self.layers(self.first(features)), rare], 1))
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (Cnn, (3, 96, 96)),
    "encoder": (Encoder, (64, 256)),
    "tabular": (Tabular, (64,)),
}


def measured(name: str, folder: Path, *, threads: int, batch: int) -> list[object]:
    """One row: the model, what runs where, milliseconds of each, and offloaded / eager."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    eager = EagerSession(build().eval(), torch.randn(3, *shape))
    exported = torch_export.export(eager.module, eager.calling)
    try:
        emit.emit(exported, folder / "whole")
        raise SystemExit(f"torch.onnx translates {name} as a whole: give it an operator that it has not")
    except CaptureError:
        pass  # that is what is measured: there is no ONNX program of the whole
    path = offload_emit.emit(exported, folder / "offload")
    sessions: dict[str, Session] = {
        "eager": eager,
        "torch_export": open_session(
            "torch_export", torch_export.emit(exported, folder / "export"), exported.signature
        ),
        "offload": open_session("offload", path, exported.signature, settings=SessionSettings(threads=threads)),
    }
    proof = prove(sessions["offload"], eager, make_probes(eager.example, signature=exported.signature))
    if not proof.proven:
        raise SystemExit(f"{name}: the offloaded program is not proven: {proof.reason}")
    request = {eager.signature.inputs[0].name: torch.randn(batch, *shape).numpy()}
    ms = _in_turns(sessions, request)
    plan = offload.read(path)
    there = f"{sum(len(part.nodes) for part in plan.parts)}/{plan.operators} in {len(plan.parts)}"
    return [name, there, len(proof.evidence), *ms.values(), ms["offload"] / ms["eager"]]


def _in_turns(sessions: dict[str, Session], request: dict[str, object]) -> dict[str, float]:
    """The median milliseconds of each; a turn runs each once, so that other load slows all alike."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(WARM_UP + TURNS):
        for name, session in sessions.items():
            started = time.perf_counter()
            session.run(request)  # type: ignore[arg-type]
            if turn >= WARM_UP:
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.offload")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of: {', '.join(MODELS)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(prefix="trueline-bench-") as folder:
        rows = [
            measured(name, Path(folder) / name, threads=given.threads, batch=given.batch)
            for name in given.models or MODELS
        ]
    ratios = [float(str(row[-1])) for row in rows]
    report(
        ["model", "in onnxruntime", "probes", "eager ms", "torch_export ms", "offload ms", "offload / eager"],
        rows,
        {"offload_ratio": round(statistics.median(ratios), 3), "worst": round(max(ratios), 3), "models": len(rows)},
    )


if __name__ == "__main__":
    main()
