"""A bundle with files of tables goes through a registry to the processes of a server, and so does its next version."""

import re
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from trueline.bundle import open_bundle
from trueline.bundle.delta import apply_delta
from trueline.capture.api import capture
from trueline.capture.deltas import make_delta
from trueline.checkpoint import checkpoint
from trueline.ps.model.embedding import Embedding
from trueline.registry import register, resolve
from worlds import servers
from worlds.recipes import untrained
from worlds.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.long]

DIM = 16
KNOWN = np.unique(np.random.default_rng(0).integers(-(2**53), 2**53, size=60_000))
ROWS = torch.randn(len(KNOWN), DIM, generator=torch.Generator().manual_seed(2))
PROCESSES = 2


class Users(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.user = Embedding(DIM)

    def forward(self, user):
        return self.user(user)


def capture_rows(out, rows):
    state = {"user.anchor": torch.empty(0, DIM), "user.ids": torch.from_numpy(KNOWN), "user.rows": rows}
    saved = checkpoint.write(out.with_suffix(".checkpoint"), step=1, state={"model": state}, facts={})
    recipe = untrained(Users, examples=lambda: {"user": torch.from_numpy(KNOWN[:6])})
    capture(recipe, saved, out, formats=["onnx"], table_rows="float16", table_file_mb=1)
    return open_bundle(out)


def ask(running, ids):
    inputs = [{"name": "user", "shape": [len(ids)], "datatype": "INT64", "data": ids.tolist()}]
    answer = servers.post(f"{running.url}/v2/models/clicks/infer", json={"inputs": inputs})
    return np.array(answer.json()["outputs"][0]["data"], np.float32).reshape(len(ids), DIM)


def count_mapped(pid, path):
    """Bytes of a file that a process has in memory: of pages that others have too, and of its own."""
    shared, own, counted = 0, 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-", line):
            counted = line.endswith(str(path))
        elif counted and line.startswith("Shared_"):
            shared += int(line.split()[1]) * 1024
        elif counted and line.startswith("Private_Dirty"):
            own += int(line.split()[1]) * 1024
    return shared, own


def test_processes_share_the_files_of_a_registered_table_and_follow_to_the_version_that_a_delta_makes(
    tmp_path, new_registry, monkeypatch
):
    uri = new_registry(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    first = capture_rows(tmp_path / "1.bundle", ROWS)
    later = ROWS.clone()
    later[:100] += 1.0
    second = capture_rows(tmp_path / "2.bundle", later)
    make_delta(first, second, tmp_path / "2.delta")
    register(first.path, name="clicks", tracking_uri=uri)
    tolerance = max(one.lineage()["tables"][0]["largest_change"] for one in (first, second)) * 1.01
    ids = KNOWN[::97]
    with servers.running("models:/clicks@champion", processes=PROCESSES, follow_s=1.0) as running:
        assert np.abs(ask(running, ids) - ROWS[::97].numpy()).max() <= tolerance
        files = sorted(resolve("models:/clicks/1", tracking_uri=uri).path.glob("programs/*.safetensors"))
        assert len(files) >= 2
        pids = [one.pid for one in psutil.Process(running.pid).children(recursive=True)]

        def sharing():
            found = [count_mapped(pid, files[0]) for pid in pids if psutil.pid_exists(pid)]
            ask(running, KNOWN)  # whichever process answers touches all rows
            return [one for one in found if one[0] > 0.5 * files[0].stat().st_size and not one[1]]

        until(lambda: len(sharing()) == PROCESSES, "both processes have the file in memory once")
        pulled = resolve("models:/clicks/1", tracking_uri=uri).path
        applied = apply_delta(open_bundle(pulled), tmp_path / "2.delta", tmp_path / "applied.bundle")
        assert applied.digest == second.digest
        register(applied.path, name="clicks", tracking_uri=uri)
        servers.eventually(lambda: np.abs(ask(running, KNOWN[:100]) - later[:100].numpy()).max() <= tolerance)
        assert np.abs(ask(running, ids) - later[::97].numpy()).max() <= tolerance
