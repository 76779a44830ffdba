"""The stand-in for `torch._dynamo`: eager training never imports the real one, and what compiles gets all of it."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trueline import events
from trueline.recipe.settings import Strategy
from trueline.train.api import train
from trueline.train.launch.preload import PRELOAD
from trueline.train.settings import WORKERS
from worlds.jobs import TESTS, TINY, JobGate
from worlds.killer import Killer

TABLES = TESTS / "ps" / "recipes"
EAGER = """
import sys, tempfile, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trueline.train import dynamo
dynamo.defer()
store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
replicated = DistributedDataParallel(model)
for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
    optimizer = kind(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    replicated(torch.randn(8, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
dist.destroy_process_group()
for module in list(sys.modules.values()):  # as `inspect` and `warnings` do
    getattr(module, "__file__", None), getattr(module, "__warningregistry__", None)
"""
PARTS = "[name for name in sys.modules if name.startswith('torch._dynamo.')]"


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_eager_training_in_a_group_imports_no_compiler() -> None:
    assert run(f"{EAGER}print({PARTS}, dynamo.is_loaded())") == "[] False"


USES = (
    "from torch._dynamo.utils import counters",
    "import torch._dynamo.config",
    "from torch._dynamo import config",
    "torch._dynamo.config.suppress_errors = False",
    "torch._dynamo.reset()",
    "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
    "torch.compiler.disable(lambda x: x + 1)",
    "torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False)",
    "torch._dynamo.eval_frame",
)


@pytest.mark.parametrize(
    "uses", [pytest.param(USES[:2], marks=pytest.mark.jobs), pytest.param(USES[2:], marks=pytest.mark.long)]
)
def test_whatever_else_is_used_of_it_is_the_real_one_and_runs_once(uses: tuple[str, ...]) -> None:
    check = f"""
import os, torch.utils.checkpoint
deferred = sys.modules["torch._dynamo"]
for use in {uses!r}:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, use
        continue
    mode = deferred.utils.get_optimize_ddp_mode()
    assert not dynamo.is_loaded()
    exec(use)
    real = sys.modules["torch._dynamo"]
    assert dynamo.is_loaded() and real is torch._dynamo is not deferred, real
    for name in {PARTS}:
        held = real
        for part in name.split(".")[2:]:
            held = getattr(held, part, None)
        if isinstance(held, type(sys)):
            assert held is sys.modules[name], f"{{name}} ran twice"
            assert held.__spec__.loader.name == name, held.__spec__
    assert deferred.utils is real.utils and deferred.config is real.config and deferred.trace_rules is real.trace_rules
    assert mode == real.utils.get_optimize_ddp_mode()
    optimizer.step()
    os._exit(0)
print("real")
"""
    assert run(EAGER + check) == "real"


@pytest.mark.jobs
def test_a_compiler_that_comes_later_leaves_alone_what_torch_had_disabled_before() -> None:
    check = """
def step(x):
    optimizer.zero_grad()
    return x + 1

assert torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"] is not None
torch.compile(step, backend="eager")(torch.ones(2))
(name,) = torch._dynamo.utils.counters["graph_break"]
print("Optimizer.zero_grad" in name)
"""
    assert run(EAGER + check) == "True"


@pytest.mark.jobs
def test_no_module_of_a_worker_imports_it() -> None:
    modules = ", ".join([*WORKERS.values(), *PRELOAD])
    assert run(f"import sys, {modules}\nprint({PARTS})") == "[]"


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("strategy", "recipe", "servers"), [("allreduce", TINY, 1), ("ps", "counting.py", 1), ("hybrid", "hybrid.py", 1)]
)
def test_a_job_that_compiles_nothing_imports_no_compiler(
    tmp_path: Path, strategy: Strategy, recipe: str, servers: int
) -> None:
    folder = Path(shutil.copytree(TABLES, tmp_path / "project"))
    code = (folder / recipe).read_text().replace("def loss(", "def loss_of(")
    (folder / "recipe.py").write_text(f"""{code}

def loss(outputs, labels):
    import os, sys
    with open({str(tmp_path / "seen")!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{{PARTS}}}\\n")
    return loss_of(outputs, labels)
""")
    train(folder / "recipe.py", workers=2, job_dir=tmp_path / "job", strategy=strategy, epochs=2, servers=servers)
    seen = dict(line.split(" ", 1) for line in (tmp_path / "seen").read_text().splitlines())
    assert len(seen) >= 2
    assert set(seen.values()) == {"[]"}, seen


@pytest.mark.jobs
def test_what_replaces_a_worker_that_needed_it_has_it_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, seen, gate = tmp_path / "recipe.py", tmp_path / "seen", JobGate(tmp_path, monkeypatch)
    recipe.write_text(f"""{TINY.read_text().replace("def loss(", "def loss_of(")}

def loss(outputs, labels):
    import os, sys
    with open({str(seen)!r}, "a") as file:
        file.write(f"{{os.environ['TRUELINE_REF']}} {{bool({PARTS})}}\\n")
    import torch._dynamo.config
    return loss_of(outputs, labels)
""")
    killer = Killer(tmp_path / "job", [(10, "worker-1")])

    def listen(name: str, fields: dict[str, Any]) -> None:
        killer(name, fields)
        if (name, fields.get("worker")) == ("worker.joined", "worker-1.1"):
            gate.open()

    with events.listening(listen):
        train(recipe, workers=2, job_dir=tmp_path / "job", epochs=12)
    lines = [line.split() for line in seen.read_text().splitlines()]
    first = dict(reversed(lines))
    assert first == {"worker-0.0": "False", "worker-1.0": "False", "worker-1.1": "True"}
