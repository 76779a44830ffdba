"""An agent that imports before its job is prepared, and what it imports."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from trueline import files
from trueline.train import settings
from trueline.train.launch.preload import PRELOAD, EarlyAgent, find_preload
from trueline.train.settings import JobSettings
from worlds.jobs import TINY
from worlds.waiting import until

pytestmark = pytest.mark.slow


def test_an_agent_imports_the_worker_of_its_strategy_and_the_libraries_of_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import os\nimport numpy\nfrom torch.nn import functional\nimport of_the_user\n")
    assert find_preload("allreduce", recipe) == ("trueline.train.worker.main", *PRELOAD, "numpy", "torch.nn")
    assert find_preload("ps", Path("module:object"))[0] == "trueline.ps.worker"


def test_an_early_agent_that_no_launcher_takes_over_ends_with_its_block():
    with EarlyAgent("allreduce", Path(TINY)) as early:
        agent = psutil.Process(early._process.pid)
        assert agent.is_running()
    assert not agent.is_running()
    assert not early.scratch.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda one: one.name)
def test_a_signal_before_the_job_has_begun_leaves_neither_agent_nor_folder(number, tmp_path):
    """Until the launcher takes over, nobody else would end the agent and remove its folder."""
    script = f"""
import signal
from pathlib import Path
from trueline.train.launch.preload import EarlyAgent

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with EarlyAgent("allreduce", Path({str(TINY)!r})) as early:
    print(early._process.pid, flush=True)
    signal.pause()
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        agent = int(run.stdout.readline())
        assert len(list(tmp_path.iterdir())) == 1
        run.send_signal(number)
        said = run.stderr.read().decode().splitlines()[-1]
    assert said.startswith("KeyboardInterrupt" if number == signal.SIGINT else "trueline.errors.JobStopped"), said
    assert not psutil.pid_exists(agent)
    assert list(tmp_path.iterdir()) == []


def test_a_new_launch_deletes_the_folders_of_launches_that_were_killed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = "from trueline import files; print(files.TemporaryFolder('launch').path, flush=True); input()"
    command, env = [sys.executable, "-c", script], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        left = Path(killed.stdout.readline().decode().strip())
        (left / "agent.log").write_text("of a killed launch\n")
        with files.TemporaryFolder.after_sweep("launch") as own:
            assert left.exists()
        killed.kill()
        killed.wait()
        with files.TemporaryFolder.after_sweep("launch") as own:
            assert list(tmp_path.iterdir()) == [own]


def test_what_an_early_agent_writes_is_in_the_log_of_the_job(tmp_path):
    with EarlyAgent("allreduce", Path(TINY)) as early:
        early._log.write_text("before\n")
        log = tmp_path / "logs" / "agent.log"
        process = early.hand_over(log)
        with early._log.open("a") as file:
            file.write("after\n")
    assert log.read_text() == "before\nafter\n"
    assert process.poll() is None  # it is the launcher's, which ends it by the lifeline
    early.lifeline.end()
    until(lambda: process.poll() is not None, "the end of the agent")


def test_the_head_of_a_submitted_job_starts_its_agent_before_it_imports_what_takes_long():
    late = {"torch", "numpy", "trueline.train.launch.launcher"}
    script = "import sys, trueline.train.cluster.head; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert late.isdisjoint(found), late.intersection(found)


def test_a_resumed_jobs_agent_begins_before_torch_is_imported_and_the_job_is_prepared_without_it(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(Path(TINY).read_text())
    job = JobSettings(
        name="tiny", recipe=str(recipe), recipe_digest=files.sha256_file(recipe), workers=2, epochs=6, global_batch=30,
    )  # fmt: skip
    (tmp_path / "job").mkdir()
    settings.save(job, tmp_path / "job")
    script = f"""
import sys
from trueline.cli.jobs import _launch
from trueline.train.launch import preload

class Agent:
    def __init__(self, strategy, users):
        print(strategy, users, "torch" in sys.modules)
    def __enter__(self):
        return self
    def __exit__(self, *error):
        print("ended")

def launch(prepare, given, early):
    print(prepare(workers="2"), type(early).__name__, "torch" in sys.modules)

preload.EarlyAgent, _launch.launch = Agent, launch
from trueline.cli import main
sys.argv[1:] = ["resume", {str(tmp_path / "job")!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    expected = [f"allreduce {recipe} False", f"{tmp_path / 'job'} Agent False", "ended"]
    assert done.stdout.splitlines()[:3] == expected, done.stderr
