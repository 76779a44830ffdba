"""A client that submits manifests: commands for bash, and scripts of torch with process groups over gloo."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil

from worlds.clusters import Client
from worlds.waiting import until

GLOO = """\
import os, signal, sys, time
import torch, torch.distributed as dist

number = int(os.environ["LEARNER_ID"])
dist.init_process_group(
    "gloo", init_method="file:///job/" + os.environ["TRAINING_ID"], world_size=int(os.environ["NUM_LEARNERS"]),
    rank=eval(sys.argv[1], {"number": number}), group_name="train_dist",
)
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, sum {total.item():g}", flush=True)
gate = os.environ["RESULT_BUCKET_DIR"] + "/gate"
opened = torch.zeros(1)
while not opened:
    opened.fill_(os.path.exists(gate))
    dist.all_reduce(opened)
    time.sleep(0.05)
dist.barrier()
if number > 1:
    while True:
        time.sleep(1_000_000)
"""
"""Learners that step until the gate is there; then learner 1 ends, and the others sleep as FfDL's examples let them."""


class LearnerClient(Client):
    """Submits manifests of `folder`/m."""

    def submit_command(self, command: str, *options: str, on: str = "local", learners: int = 2, **files: str) -> str:
        """Submits a manifest with this command, and files by name (`train_py`) beside it; returns the job."""
        folder = self.folder / "m"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(text)
        block = "".join(f"    {line}\n" for line in command.splitlines())
        (folder / "manifest.yml").write_text(
            f"name: m\ncpus: 1\nlearners: {learners}\nframework:\n  name: pytorch\n  command: |\n{block}"
        )
        return self.submit_manifest(folder / "manifest.yml", *options, on=on)

    def submit_manifest(self, path: Path, *options: str, on: str = "local") -> str:
        text = self.run("submit", str(path), "--on", on, "--store", str(self.store), "--json", *options)
        self.job = str(json.loads(text)["job"])
        return self.job

    @property
    def results(self) -> Path:
        """RESULT_DIR."""
        return self.store / self.job / "results" / self.unique

    def open_gate(self) -> None:
        (self.results.parent / "gate").touch()

    def read_output(self, number: int) -> str:
        return self.where.read_log(f"logs/learner-{number}.log").decode()

    def wait_output(self, number: int, text: str, *, count: int = 1) -> None:
        until(lambda: self.read_output(number).count(text) >= count, lambda: f"{text} of {number}: {self.logs()}")

    def find_scripts(self, number: int) -> list[psutil.Process]:
        """The processes of a learner's script, that which has forked the others first."""
        found = []
        for one in psutil.process_iter():
            try:
                env = one.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if env.get("TRAINING_ID") == self.unique and env.get("LEARNER_ID") == str(number):
                found.append(one)
        return sorted(found, key=lambda one: one.create_time())

    def kill_script(self, number: int) -> None:
        """SIGKILL for the newest process of a learner's script."""
        os.kill(self.find_scripts(number)[-1].pid, signal.SIGKILL)

    def expect_nothing_left(self) -> None:
        until(lambda: not self.processes(), "the end of all processes")
        learners = range(1, 1 + int(self.where.read_job().manifest["learners"]))
        until(lambda: not any(map(self.find_scripts, learners)), "the end of all scripts")
