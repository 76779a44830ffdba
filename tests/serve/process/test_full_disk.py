"""A full temporary folder is the server's fault; what is loaded is served on, and room is all that is needed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from trueline.bundle import pack
from worlds import archives, bundles, servers

pytestmark = pytest.mark.slow
SIZE = 64 * 2**10


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 64 KiB as the folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={SIZE},mode=700", "none"]
    if os.geteuid() or subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_temporary_folder_is_507_until_there_is_room_again_and_stops_no_model(
    tmp_path: Path, temporary: Path
) -> None:
    store = bundles.store(tmp_path / "store", "good")
    pack(bundles.double_plus(tmp_path / "whole").path, store / "packed.tlb")
    archives.mar(store / "noop.mar")
    archives.mar(store / "large.mar", extra={"weights": os.urandom(4 * SIZE)}, modelName="large")
    row = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
    with servers.running(store=store, load="good", management_port=0, allow_code=True) as server:

        def register(name: str) -> int:
            query = f"models?url={name}&initial_workers=1&synchronous=true"
            return servers.post(f"{server.management_url}/{query}").status_code

        assert register("large.mar") == 507
        assert not list(temporary.glob("trueline-archive*")), "what was unpacked is gone"
        filler = temporary / "filler"
        filler.write_bytes(bytes(os.statvfs(temporary).f_bavail * 4096))
        assert (register("packed.tlb"), register("noop.mar")) == (507, 507)
        assert servers.post(f"{server.url}/v2/models/good/infer", json=row).status_code == 200
        filler.unlink()
        assert (register("packed.tlb"), register("noop.mar")) == (200, 200)
