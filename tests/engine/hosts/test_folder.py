"""Which files travel to joined hosts, and that they arrive as they are."""

import asyncio

import pytest

from trueline.engine.hosts import folder
from trueline.engine.hosts.messages import TravelledFile
from trueline.errors import StorageError, UsageError


@pytest.fixture
def project(tmp_path):
    """A recipe's folder with what a user has beside it."""
    root = tmp_path / "project"
    for name, text in {
        "recipe.py": "x = 1", "parts/layers.py": "y = 2", "data/big.csv": "1", "notes.tmp": "", "keep.tmp": "",
        ".git/config": "", "__pycache__/recipe.pyc": "", "venv/pyvenv.cfg": "", "venv/lib.py": "",
        "runs/a-1/job.json": "{}", "runs/a-1/logs/x.log": "", "parts/old/a.py": "",
        ".gitignore": "data/\n*.tmp\n!keep.tmp\n",
        "parts/.gitignore": "old\n",
    }.items():  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_code_travels_and_ignored_files_environments_and_jobs_stay(project):
    names = [path.relative_to(project).as_posix() for path in folder.list_files(project)]
    assert names == [".gitignore", "keep.tmp", "parts/.gitignore", "parts/layers.py", "recipe.py"]


def test_files_arrive_with_their_content_and_are_fetched_once(project, tmp_path):
    packed = folder.pack(folder.code_files(project), tmp_path / "blobs")
    asked = []

    async def fetch(digest):
        asked.append(digest)
        return (tmp_path / "blobs" / digest).read_bytes()

    cache = tmp_path / "cache"
    assert asyncio.run(folder.unpack(packed, tmp_path / "one", cache, fetch)) == len(set(asked)) == len(asked)
    assert (tmp_path / "one" / "code" / "parts" / "layers.py").read_text() == "y = 2"
    assert asyncio.run(folder.unpack(packed, tmp_path / "two", cache, fetch)) == 0
    assert (tmp_path / "two" / "code" / "recipe.py").read_text() == "x = 1"


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "code/../../up"])
def test_a_path_that_leaves_the_jobs_folder_is_refused(tmp_path, path):
    async def fetch(digest):
        raise AssertionError("it is not fetched")

    with pytest.raises(StorageError, match="outside of the job's folder"):
        asyncio.run(folder.unpack((TravelledFile(path, "0" * 64, 1),), tmp_path, tmp_path, fetch))


def test_other_content_than_the_digests_is_refused(tmp_path):
    async def fetch(digest):
        return b"other"

    with pytest.raises(StorageError, match="other content than its digest"):
        asyncio.run(folder.unpack((TravelledFile("a", "0" * 64, 5),), tmp_path / "job", tmp_path / "cache", fetch))


def test_a_folder_that_is_too_large_is_refused_with_its_largest_file(project, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MOST_BYTES", 20)
    (project / "weights.bin").write_bytes(bytes(100))
    with pytest.raises(UsageError, match="for other hosts are") as raised:
        folder.pack(folder.code_files(project), tmp_path / "blobs")
    assert "code/weights.bin" in raised.value.hint
