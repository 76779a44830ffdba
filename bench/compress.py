"""How much faster do compressed programs get, and what do they lose? A table, then one JSON object.

    OMP_WAIT_POLICY=passive python -m bench.compress [--only speed,accuracy,prune,kill,distill,search] [--quick]

With that variable, threads of torch that wait leave the processor to the program that is timed next.

speed       ResNet-50, MobileNetV2 and a 6-layer encoder, built here with random weights, batch 1: every variant, the
            parent in ONNX Runtime and the eager model, alternately in one run. The variant that a first run chooses is
            compared with the best of all in a second.
accuracy    trained models of three kinds (images, audio or tokens, a table), on 5,000 evaluation records or more each:
            real ones where a package has them (see `bench/_real_recipes.py`), else generated ones
prune       28 architectures of the project's zoo without 30 % of their channels: run at other sizes, captured, proven
kill        a search that is killed after its third candidate and typed again: candidates that are tried twice
distill     the share of the gap to its teacher that a student closes when it is taught (see `bench/_distilled.py`)
search      how long the whole search of a ResNet-18 takes to 95 % of its best speed (see `bench/_search_time.py`)

A section that fails has null for its figures, and the others continue.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench._distilled import measure_distill
from bench._search_time import measure_search
from bench._table import mark, report
from torch import nn

Figures = dict[str, Any]
PRUNED = tuple(
    """
    lenet vgg resnet mobilenet densenet efficientnet unet convnext shufflenet inception segmenter pyramid yolo
    super_resolution style_transfer autoencoder vae siamese video text_cnn tcn mlp_regressor torch_encoder nano_gpt
    tiny_vit mlp_mixer conformer crnn
    """.split()  # noqa: SIM905 - as a tuple they take thirty lines
)
GOALS = {
    "resnet50_vs_eager": ">= 6", "mobilenet_vs_eager": ">= 8", "encoder_vs_eager": ">= 7",
    "search_best_of_hand": ">= 0.95", "accuracy_loss_max": "<= 0.002", "prune_right": ">= 25", "lost_on_kill": "<= 0",
    "distill_closed": ">= 0.5", "search_minutes_to_95": "<= 15",
}  # fmt: skip


class Bottleneck(nn.Module):
    """He et al., arXiv 1512.03385, with the stride in the middle."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = stride == 1 and inside == out
        self.skip = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.skip(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inside, width, stride if number == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class Inverted(nn.Module):
    """Sandler et al., arXiv 1801.04381."""

    def __init__(self, inside: int, out: int, stride: int, grow: int) -> None:
        super().__init__()
        wide = inside * grow
        first = [] if grow == 1 else [nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        self.path = nn.Sequential(
            *first, nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.same = stride == 1 and inside == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.path(x) if self.same else self.path(x)


def mobilenet() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
    inside = 32
    for grow, out, count, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(count):
            layers.append(Inverted(inside, out, stride if number == 0 else 1, grow))
            inside = out
    layers += [nn.Conv2d(inside, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False))


BIG: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet50": (resnet50, (1, 3, 224, 224)), "mobilenet": (mobilenet, (1, 3, 224, 224)),
    "encoder": (encoder, (4, 128, 512)),
}  # fmt: skip


def measure_speed(quick: bool) -> Figures:
    figures: Figures = {}
    chosen = []
    for name in ("mobilenet",) if quick else BIG:
        make, shape = BIG[name]
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            found = _time_variants(make().eval(), shape, Path(folder), 2.0 if quick else 20.0)
        figures |= {f"{name}_{key}": value for key, value in found.items()}
        chosen.append(found["of_best"])
    return figures | {"search_best_of_hand": min(chosen)}


def _time_variants(model: nn.Module, shape: tuple[int, ...], folder: Path, seconds: float) -> Figures:
    from trueline.compress.measure.kernels import size_of
    from trueline.compress.measure.latency import measure_alternately
    from trueline.runtime.open import open_session

    example = torch.randn(shape)
    path, signature = _export(model, example, folder)
    batches = [{"x": np.random.default_rng(seed).standard_normal(shape, np.float32)} for seed in range(16)]
    paths = {"parent": path, **_make_variants(path, batches, folder)}
    sessions = {"parent": open_session("onnx", path, signature)}
    for name in (name for name in paths if name != "parent"):
        sessions[name] = _open_as_served(name, paths[name], sessions["parent"], batches)
    runs = {name: partial(session.run, batches[0]) for name, session in sessions.items()}
    how, eager = _faster_eager(model, example, seconds / 4)
    first = measure_alternately({**runs, "eager": eager}, seconds=seconds / 2, slow="eager")
    rounds = measure_alternately({**runs, "eager": eager}, seconds=seconds, slow="eager")
    ways = [name for name in runs if name != "parent"]
    best = max(ways, key=lambda name: first.speedup(name, "parent")[0])
    for name in ("eager", *runs):
        print(f"  {name}: {rounds.timing(name).median_ms:.2f} ms, {rounds.speedup(name, 'eager')[0]:.2f} x eager")
    own = "openvino-fp32" if best.startswith("openvino") else "parent"
    fastest = max(rounds.speedup(name, "parent")[0] for name in ways)
    return {
        "vs_eager": rounds.speedup(best, "eager")[0], "vs_fp32": rounds.speedup(best, "parent")[0],
        "vs_own_fp32": rounds.speedup(best, own)[0],
        "of_best": rounds.speedup(best, "parent")[0] / fastest, "chosen": best, "eager": how,
        "size_ratio": size_of(path) / size_of(paths[best]),
    }  # fmt: skip


def _open_as_served(name: str, path: Path, parent: Any, batches: list[dict[str, Any]]) -> Any:
    """As a server has it that gets requests of the sizes of `batches`: compiled once more for these where a search
    would do so, if both forms differ by no more than the first differs from the parent."""
    from trueline.compress.fixed_sizes import GAIN, compare_speed, reopen
    from trueline.runtime.open import open_session
    from trueline.runtime.openvino import compile_fixed

    format, signature = "openvino" if name.startswith("openvino") else "onnx", parent.signature
    session = open_session(format, path, signature)
    if format == "onnx":
        return session
    sizes = signature.sizes(batches[0])
    fixed = compile_fixed(path, signature, sizes)
    speed, low = compare_speed(session, fixed, batches[0], 3.0)
    apart = accepted = 0.0
    for batch in batches:
        answers = [one.run(batch)["output"] for one in (parent, session, fixed)]
        accepted = max(accepted, float(np.abs(answers[0] - answers[1]).max()))
        apart = max(apart, float(np.abs(answers[1] - answers[2]).max()))
    print(f"  {name}: for these sizes alone {speed:.3f} times as fast, {low:.3f} at least; apart {apart:.2g}, accepted "
          f"{accepted:.2g}")  # fmt: skip
    return reopen(session, path, sizes) if speed >= GAIN and low > 1 and apart <= accepted else session


class Named(nn.Module):
    """`users`, with an input that is called x."""

    def __init__(self, users: nn.Module) -> None:
        super().__init__()
        self.users = users

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.users(x)
        return found


def _export(model: nn.Module, example: torch.Tensor, folder: Path) -> tuple[Path, Any]:
    """The ONNX program that `trueline capture` writes of `model`, without the proof, and its signature."""
    from trueline.capture.export.torch_export import export
    from trueline.capture.model.eager import EagerSession
    from trueline.capture.onnx.emit import emit

    users = Named(model).eval()
    exported = export(users, EagerSession(users, example).calling)
    return emit(exported, folder), exported.signature


def _make_variants(path: Path, batches: list[dict[str, Any]], folder: Path) -> dict[str, Path]:
    """What each method of a search makes of the program at `path`, by its name."""
    from trueline.compress.apply.contract import ParentProgram
    from trueline.compress.apply.quantizers import QUANTIZERS
    from trueline.compress.measure.kernels import count_kernels
    from trueline.compress.method import BY_HAND
    from trueline.errors import MissingPackage

    program = ParentProgram(path, folder / "work", lambda: batches)
    program.work.mkdir()
    paths = {}
    for quantizer in (one for kind, one in QUANTIZERS.items() if kind not in BY_HAND):
        for method in quantizer.list_variants():
            out = folder / method.name.replace(":", "-") / "model.onnx"
            out.parent.mkdir()
            try:
                quantizer.apply(method, program, out)
                if not quantizer.find_fault(count_kernels(out, method.format)):
                    paths[method.name] = out
            except MissingPackage as error:
                print(f"  {method.name}: not tried: {error.message}")
    return paths


def _faster_eager(model: nn.Module, example: torch.Tensor, seconds: float) -> tuple[str, Callable[[], None]]:
    """The eager model as this machine runs it faster, and how: without torch's fused path of nn.TransformerEncoder, as
    it is trained, or with it."""
    from trueline.compress.measure.latency import measure_alternately
    from trueline.recipe.eager_mode import USES_FAST_PATH, as_trained

    def plain() -> None:
        with torch.no_grad(), as_trained():
            model(example)

    def fused() -> None:
        with torch.no_grad():
            model(example)

    if not any(isinstance(part, USES_FAST_PATH) for part in model.modules()):
        return "plain", plain
    ways = {"plain": plain, "fused": fused}
    rounds = measure_alternately(ways, seconds=seconds)
    for name in ways:
        print(f"  eager, {name}: {rounds.timing(name).median_ms:.2f} ms")
    faster = min(ways, key=lambda name: rounds.timing(name).median_ms)
    return faster, ways[faster]


RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

name, epochs = "{kind}", 1
KIND = "{kind}"
COUNTS = {{"training": 6000, "evaluation": 5000, "prediction": 10}}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(500, 64), nn.Linear(64, 256), nn.Linear(256, 4)

    def forward(self, tokens):
        return self.last(self.first(self.embed(tokens).mean(1)).relu())


def model():
    if KIND == "tokens":
        return Tokens()
    if KIND == "table":
        return nn.Sequential(nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 36, 10),
    )


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)


def optimizer(params):
    return torch.optim.Adam(params, lr=0.003)


def dataset(mode):
    draw, count = torch.Generator().manual_seed(7), COUNTS[mode]
    if KIND == "tokens":
        tables = torch.rand(4, 500, generator=draw) ** 3
        draw.manual_seed(len(mode))
        labels = torch.randint(0, 4, (count,), generator=draw)
        return TensorDataset(torch.multinomial(tables[labels], 24, replacement=True, generator=draw), labels)
    if KIND == "table":
        weights = torch.randn(24, 3, generator=draw)
        draw.manual_seed(len(mode))
        rows = torch.randn(count, 24, generator=draw)
        return TensorDataset(rows, (rows.sin() @ weights + 0.3 * torch.randn(count, 3, generator=draw)).argmax(1))
    shapes = torch.rand(10, 1, 12, 12, generator=draw)
    draw.manual_seed(len(mode))
    labels = torch.randint(0, 10, (count,), generator=draw)
    return TensorDataset(shapes[labels] + 0.6 * torch.randn(count, 1, 12, 12, generator=draw), labels)


def metrics():
    return {{"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels).float()}}
"""


def make_bundle(kind: str, folder: Path, source: Path | None = None) -> Path:
    """Trains for some epochs, or takes the weights that `source` has, and captures."""
    from bench._real_recipes import EPOCHS, write_recipe
    from safetensors.torch import save_file

    import trueline

    file = folder / "recipe.py"
    file.write_text(RECIPE.format(kind=kind) if source is None else write_recipe(kind, source))
    recipe = trueline.load_recipe(file)
    torch.manual_seed(0)
    model, data = recipe.model(), recipe.dataset("training")
    optimizer = recipe.optimizer(model.parameters())
    if source is not None and not EPOCHS[kind]:
        model.load_state_dict(torch.load(source, weights_only=True))
    else:
        for step in range(4 * len(data) // 100):
            if step * 100 % len(data) < 100:
                order = torch.randperm(len(data))
            inputs, labels = data[order[[at % len(data) for at in range(step * 100, step * 100 + 100)]]]
            optimizer.zero_grad()
            recipe.loss(model(inputs), labels).backward()
            optimizer.step()
    save_file(model.state_dict(), folder / "weights.safetensors")
    out = folder / f"{kind}.bundle"
    trueline.capture(recipe, folder / "weights.safetensors", out, formats=["onnx"])
    return out


def measure_accuracy(quick: bool) -> Figures:
    from bench._real_recipes import find_file

    import trueline
    from trueline.errors import BudgetMissed

    figures: Figures = {}
    for kind in ("table",) if quick else ("images", "audio", "table"):
        source = find_file(kind)
        if source is None:
            kind = {"audio": "tokens"}.get(kind, kind)
        with tempfile.TemporaryDirectory() as folder:
            bundle = make_bundle(kind, Path(folder), source)
            figures[f"{kind}_records"] = (
                "generated" if source is None else "real" if kind != "audio" else "real weights"
            )
            try:
                found = trueline.compress(bundle, budget="accuracy=0.5%", target="latency", minutes=3)
            except BudgetMissed as error:
                print(error.message)
                figures[f"{kind}_loss"] = None
                continue
            print(found.as_text(), flush=True)
            figures |= {
                f"{kind}_loss": found.row.loss, f"{kind}_loss_bound": found.row.loss_high,
                f"{kind}_accuracy": found.facts["parent_value"], f"{kind}_chosen": found.row.name,
                f"{kind}_count": found.facts["evaluation_records"],
                f"{kind}_vs_fp32": found.row.vs_fp32[1], f"{kind}_vs_eager": found.row.vs_eager[1],
            }  # fmt: skip
    losses = [value for key, value in figures.items() if key.endswith("_loss")]
    return figures | {"accuracy_loss_max": None if None in losses else max(losses)}


def measure_prune(quick: bool) -> Figures:
    from bench.zoo import fresh
    from bench.zoo.catalog import architectures

    known = architectures()
    right, why = [], {}
    for name in PRUNED[:3] if quick else PRUNED:
        began = time.monotonic()
        try:
            smaller = _prune_one(known[name], fresh)
            right.append(name)
            print(
                f"  {name}: right, {smaller:.0%} of the parameters left, {time.monotonic() - began:.0f} s", flush=True
            )
        except Exception as error:  # noqa: BLE001 - a model that fails is a row
            why[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            print(f"  {name}: {why[name]}", flush=True)
    return {"prune_right": len(right), "prune_models": len(right) + len(why), "prune_failed": why}


def _prune_one(architecture: Any, fresh: Any) -> float:
    import trueline
    from trueline.compress.derive.channels import remove_channels
    from trueline.recipe.load import load_recipe

    module = architecture.module()
    example = architecture.arguments(fresh.example(architecture))
    before = sum(one.numel() for one in module.parameters())
    pruned = remove_channels(module, example, 0.3)
    blanks = {
        "name": architecture.name, "model": lambda: pruned, "examples": lambda: example,
        "dynamic_shapes": lambda: architecture.dynamic_shapes, "loss": _unused, "optimizer": _unused,
        "dataset": _unused,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:  # its probes are of other sizes, and compared with the pruned model
        trueline.capture(load_recipe(blanks), None, Path(folder) / "pruned.bundle", minutes=5)
    return sum(one.numel() for one in pruned.parameters()) / before


def _unused(*_: Any) -> Any:
    raise AssertionError("capture has no use for this blank")


def measure_kill(quick: bool) -> Figures:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        bundle = make_bundle("table", folder)
        rows = folder / "table-size.bundle.search" / "rows.jsonl"
        command = [sys.executable, "-m", "trueline", "compress", str(bundle), "--target", "size", "--json"]
        search = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        while search.poll() is None and (not rows.is_file() or rows.read_bytes().count(b"\n") < 3):
            time.sleep(0.02)
        search.send_signal(signal.SIGKILL)
        search.wait()
        kept = rows.read_bytes()
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True)
        same = rows.read_bytes().startswith(kept)
        return {"lost_on_kill": 0 if same and done.stdout else kept.count(b"\n")}


SECTIONS = {"speed": measure_speed, "accuracy": measure_accuracy, "prune": measure_prune, "kill": measure_kill,
            "distill": measure_distill, "search": measure_search}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--quick", action="store_true", help="less of each: checks that it works, measures nothing")
    args = parser.parse_args()
    figures: Figures = {}
    for name in args.only.split(","):
        print(f"{name}:", flush=True)
        try:
            figures |= SECTIONS[name](args.quick)
        except Exception:  # noqa: BLE001 - the other sections continue
            traceback.print_exc()
    rows = [(key, "-" if figures.get(key) is None else f"{figures[key]:.4g}", goal, "") for key, goal in GOALS.items()]
    rows += [(key, f"{value:.4g}", "", "") for key, value in figures.items()
             if key not in GOALS and isinstance(value, int | float)]  # fmt: skip
    report(("what", "measured", "goal", "", ""), mark(rows), {key: figures.get(key) for key in GOALS} | figures)


if __name__ == "__main__":
    main()
