"""Builds wheel and sdist, installs them as a user does and runs them: `make test-packages`, `make test-pythons`.

    python tests/packages.py            the base in a clean environment: size, imports, a served bundle, time to ready
    python tests/packages.py 3.12 …     from a recipe to an answer, on each of these Pythons that exists

Nothing of the checkout is importable there. Prints what was checked, then a line of JSON. Exit code 1 when a check
fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
UV = str(Path(sys.executable).with_name("uv"))
MAX_SERVE_MB = 350
ABSENT = ("torch", "mlflow", "scipy", "onnx", "onnxscript", "pyarrow", "pandas", "sqlalchemy")
STARTS = 5

SERVE = """
import json, sys, time, urllib.request
import trueline
from trueline.serve.api import start
assert trueline.__file__.startswith(sys.prefix), trueline.__file__
seconds = []
for _ in range(int(sys.argv[4])):
    began = time.monotonic()
    server = start(sys.argv[1])
    seconds.append(time.monotonic() - began)
    with server:
        request = urllib.request.Request(f"{server.url}/predictions/{server.model}", sys.argv[2].encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as reply:
            answer = json.load(reply)
        with urllib.request.urlopen(server.url + "/metrics") as reply:
            assert b"trueline_ready 1.0" in reply.read()
    assert sys.argv[3] in ("", json.dumps(answer)), answer
print(json.dumps(sorted(seconds)))
"""

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

name, epochs, global_batch = "line", 2, 16


def model():
    return nn.Linear(3, 2)


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)


def dataset(mode):
    rows = torch.arange(192.0).reshape(64, 3) % 7
    return TensorDataset(rows, (rows[:, 0] > 3).long())
"""


def run(
    *command: str | Path, cwd: Path | None = None, ok: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The finished command; its output is shown when it fails although `ok`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRUELINE"))}
    words = [str(one) for one in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, check=False, env={**kept, **variables})
    if ok and done.returncode:
        sys.exit(f"failed ({done.returncode}): {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done


def build(folder: Path) -> Path:
    """The wheel, built from the sdist. What a user needs is in it, and nothing else."""
    run(UV, "build", "--quiet", "--out-dir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    missing = {str(one.relative_to(ROOT / "src")) for one in data_files()} - set(names)
    assert not missing, f"not in the wheel: {sorted(missing)}"
    strange = [one for one in names if not one.startswith(("trueline/", "trueline-"))]
    assert not strange, f"in the wheel: {strange}"
    return wheel


def data_files() -> Iterator[Path]:
    for path in (ROOT / "src").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def install(wheel: Path, venv: Path, extras: str, python: str = sys.executable) -> Path:
    """The interpreter of a new environment with the wheel and `extras`, in the versions of constraints.txt."""
    run(UV, "venv", "--quiet", "--python", python, venv)
    constraints = ROOT / "constraints.txt"
    run(UV, "pip", "install", "-q", "--python", venv, "-c", constraints, "--compile-bytecode", f"{wheel}[{extras}]")
    return venv / "bin" / "python"


def megabytes(folder: Path) -> float:
    """As `du` counts: blocks, a hard link once."""
    seen = {(one.st_dev, one.st_ino): one.st_blocks for one in (path.lstat() for path in folder.rglob("*"))}
    return sum(seen.values()) * 512 / 2**20


def answer(python: Path, bundle: Path, starts: int) -> list[float]:
    """Sorted seconds to ready of `starts` servers of `bundle` in the environment of `python`, each asked once."""
    done = run(python, "-P", "-c", SERVE, bundle, "[1, 2, 3]", "[3.0, 5.0, 7.0]", str(starts), cwd=bundle.parent)
    return list(json.loads(done.stdout.splitlines()[-1]))


def check_base(folder: Path, wheel: Path) -> dict[str, float]:
    from worlds import bundles

    venv = folder / "serve"
    python = install(wheel, venv, "serve")
    size = megabytes(venv)
    print(f"trueline[serve]: {size:.0f} MB with bytecode, budget {MAX_SERVE_MB}")
    assert size <= MAX_SERVE_MB
    code = f"import importlib.util as u; print([n for n in {ABSENT!r} if u.find_spec(n)])"
    assert run(python, "-c", code).stdout.strip() == "[]"
    bundle = bundles.double_plus(folder / "tiny.bundle").path
    seconds = answer(python, bundle, STARTS)
    print(f"a bundle is served without {', '.join(ABSENT)}: ready after {seconds[len(seconds) // 2]:.2f} s "
          f"(median of {STARTS} starts, {seconds[0]:.2f} to {seconds[-1]:.2f})")  # fmt: skip
    trueline = venv / "bin" / "trueline"
    for verb in ("--help", "serve --help", "bundle verify --help", "train --help"):
        run(trueline, *verb.split())
    run(trueline, "bundle", "inspect", bundle)
    refused = run(trueline, "train", ROOT / "examples" / "digits" / "recipe.py", cwd=folder, ok=False)
    assert refused.returncode == 1
    assert "pip install 'trueline[train]'" in refused.stderr, refused.stderr
    print("`trueline train` names its extra:", refused.stderr.splitlines()[-1])
    return {"serve_install_mb": round(size), "ready_s": round(seconds[len(seconds) // 2], 3)}


def interpreter(version: str) -> str:
    """Python `version`, also of a pyenv that does not select it; empty if there is none."""
    shims = {"PYENV_VERSION": version} if "PYENV_ROOT" in os.environ else {}
    return run(UV, "python", "find", "--no-python-downloads", version, ok=False, **shims).stdout.strip()


def brings_cuda(python: Path) -> bool:
    """Whether torch for `python` comes with CUDA's libraries, gigabytes of them, and this environment's does not."""
    plan = run(UV, "pip", "install", "--dry-run", "--python", python, "-c", ROOT / "constraints.txt", "torch").stderr
    return "nvidia-" in plan and not any(one.metadata["Name"].startswith("nvidia-") for one in distributions())


def check_line(folder: Path, wheel: Path, version: str) -> str:
    """What was done on Python `version`: a bundle served, a recipe trained by two workers, captured, served."""
    from worlds import bundles

    found = interpreter(version)
    if not found:
        print(f"Python {version}: skipped, there is no such interpreter here")
        return "skipped"
    here = folder / version
    here.mkdir()
    python = install(wheel, here / "venv", "serve", found)
    answer(python, bundles.double_plus(here / "tiny.bundle").path, 1)
    if brings_cuda(python):
        print(f"Python {version}: a bundle served; not trained, torch for it comes with CUDA's libraries here")
        return "served"
    python = install(wheel, here / "train", "train", found)
    trueline = python.with_name("trueline")
    (here / "recipe.py").write_text(RECIPE)
    run(trueline, "train", "recipe.py", "--workers", "2", "--job", "job", cwd=here)
    run(trueline, "capture", "recipe.py", "job", "--out", "line.bundle", "--format", "onnx", cwd=here)
    run(python, "-P", "-c", SERVE, "line.bundle", "[1, 2, 3]", "", "1", cwd=here)
    print(f"Python {version}: trained, captured, served; {megabytes(here / 'train'):.0f} MB with trueline[train]")
    return "trained"


def main(versions: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="trueline-packages-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MB, built from the sdist")
        if versions:
            facts: dict[str, object] = {"pythons": {one: check_line(folder, wheel, one) for one in versions}}
        else:
            facts = dict(check_base(folder, wheel))
        print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
