"""The files of tables beside a hybrid job's checkpoints: two may be written at once, and what failed leaves nothing."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from trueline.errors import DiskFull
from trueline.ps.hybrid.table_files import TableFiles

SERVERS = ("server-0", "server-1")


class Link:
    """A server that writes at once, or whose disk is full."""

    def __init__(self, ref, full):
        self.ref, self.full = ref, full

    async def save(self, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if self.ref in self.full:
            raise DiskFull(f"no room left to write {path}")
        Path(path).write_bytes(b"rows")

    async def wait_saved(self, path):
        if self.ref in self.full:
            raise DiskFull(f"no room left to write {path}")

    async def stats(self):
        return SimpleNamespace(steps=99)


def files_in(folder, full, keep=2):
    async def repeat(ref, act):
        await act(Link(ref, full))

    return TableFiles(folder, keep, repeat)


def test_a_save_that_is_under_way_stays_when_the_one_before_it_ends(tmp_path):
    files = files_in(tmp_path, ())

    async def run():
        first, second = await files.begin(8, SERVERS), await files.begin(9, SERVERS)
        assert (await files.wait(8, first, SERVERS)).name == "step-8"
        return await files.wait(9, second, SERVERS)

    assert len(list(asyncio.run(run()).glob("*.part"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-8", "step-9"]


@pytest.mark.parametrize("when", ["begin", "wait"])
def test_a_full_disk_leaves_no_files_that_would_fill_it_further(tmp_path, when):
    full = {"server-1"} if when == "begin" else set()
    files = files_in(tmp_path, full)

    async def run():
        name = await files.begin(8, SERVERS)
        full.add("server-1")
        (tmp_path / name / "server-1.part").unlink()
        await files.wait(8, name, SERVERS)

    with pytest.raises(DiskFull):
        asyncio.run(run())
    assert list(tmp_path.iterdir()) == []
    asyncio.run(asyncio.wait_for(files.wait_all(), 5))


def test_a_folder_that_no_checkpoint_got_goes_with_the_next(tmp_path):
    (tmp_path / "7.2.abc").mkdir()
    files = files_in(tmp_path, ())

    async def run():
        await files.wait(8, await files.begin(8, SERVERS), SERVERS)

    asyncio.run(run())
    assert [path.name for path in tmp_path.iterdir()] == ["step-8"]
