"""A full disk under a job with parameter servers is a pause: the job says what waits, loses nothing, and goes on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trueline.train.api import train
from trueline.train.job_dir import JobDir
from worlds.counted import count_wrong
from worlds.gates import StepGate
from worlds.waiting import until

pytestmark = pytest.mark.jobs
RECIPES = Path(__file__).parent / "recipes"
EPOCHS = 5


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96m,mode=700", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class FullDiskGate(StepGate):
    """Fills the disk at step 20, kills a server and the master meanwhile, and makes room when all of them wait."""

    def __init__(self, job: Path, disk: Path) -> None:
        super().__init__(job, (20, self.fill), slack=60)
        self.filler = disk / "filler"
        self.waiting, self.told = set[str](), list[dict[str, Any]]()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        super().__call__(name, fields)
        if name == "server.waits":
            self.waiting.add(fields["server"])
            self.told.append(fields)
        elif name == "disk.full":
            self.told.append(fields)

    def fill(self) -> None:
        with self.filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    continue
            except OSError:
                pass
        until(lambda: self.waiting, lambda: f"a server waits: {self.told}")
        self.kill("server-1")
        until(lambda: "worker.lost" in self._seen, "the server's death")
        self.filler.unlink()


@pytest.mark.parametrize("strategy", ["ps", "hybrid"])
def test_a_full_disk_under_the_servers_is_a_pause_that_loses_nothing(tmp_path: Path, disk: Path, strategy: Any) -> None:
    recipe = RECIPES / ("counting.py" if strategy == "ps" else "hybrid.py")
    with FullDiskGate(disk / "job", disk) as gate:
        found = train(
            recipe, job_dir=disk / "job", strategy=strategy, workers=2, servers=2, epochs=EPOCHS, checkpoint_every=5
        )
    assert found.summary.exactly_once
    assert count_wrong(found, EPOCHS) == 0
    assert any("no room left" in fields["why"] for fields in gate.told)
    assert JobDir(disk / "job").summary.exists()
