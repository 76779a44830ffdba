"""While a process pretends to be another one, its files are its own: it finds what it has written, and no one else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.train.rehearsal import private_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("log", "lock", "held"):
        (tmp_path / name).write_text(f"{name} of others\n")
    (tmp_path / "weights.pt").write_bytes(b"old")
    return tmp_path


def read_all(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def open_and_write(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    os.write(descriptor, b"mine")
    os.close(descriptor)


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("mine\n")
    assert path.read_text() == "log of others\nmine\n"
    assert os.path.getsize(path) == path.stat().st_size == 19


def change_in_place(path: Path) -> None:
    with path.open("r+") as file:
        file.write("MY")
    assert path.read_text() == "MYg of others\n"


def overwrite(path: Path) -> None:
    open_and_write(path, os.O_WRONLY | os.O_TRUNC)
    assert path.read_text() == "mine"
    os.truncate(path, 1)
    path.chmod(0o600)
    os.utime(path, (1, 1))
    assert (path.read_text(), path.stat().st_mtime) == ("m", 1)


def remove(path: Path) -> None:
    path.unlink()
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match="log"):
        path.read_text()
    with pytest.raises(FileNotFoundError):
        os.remove(path)
    path.touch()
    assert path.read_text() == ""


def rename(path: Path) -> None:
    path.replace(path.with_name("log.1"))
    assert not path.exists()
    assert path.with_name("log.1").read_text() == "log of others\n"
    os.rename(path.with_name("log.1"), path.with_name("log.2"))
    shutil.move(path.with_name("log.2"), path)
    assert path.read_text() == "log of others\n"


def make_new(path: Path) -> None:
    with pytest.raises(FileExistsError):
        path.open("x")
    with pytest.raises(FileExistsError):
        open_and_write(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    with path.with_name("new").open("x") as file:
        file.write("mine")
    with pytest.raises(FileExistsError):
        path.with_name("new").open("x")
    assert path.with_name("new").is_file()


def make_folders(path: Path) -> None:
    deep = path.with_name("runs") / "1" / "last"
    deep.mkdir(parents=True)
    (deep / "note").write_text("mine")
    deep.rename(deep.with_name("first"))
    assert (deep.with_name("first") / "note").read_text() == "mine"


def save_arrays(path: Path) -> None:
    torch.save({"at": torch.ones(2)}, path.with_name("weights.pt"))
    assert torch.load(path.with_name("weights.pt"))["at"].tolist() == [1, 1]
    np.save(path.with_name("array.npy"), np.arange(3))
    assert np.load(path.with_name("array.npy")).tolist() == [0, 1, 2]


def fail_as_usual(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        path.with_name("missing").read_text()
    with pytest.raises(FileNotFoundError):
        (path.with_name("missing") / "deep").write_text("mine")
    with pytest.raises(FileNotFoundError):
        path.with_name("missing").replace(path)
    with pytest.raises(IsADirectoryError):
        path.parent.open("w")
    with Path(os.devnull).open("w") as file:
        file.write("nothing")
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        file.write("through")
    with open(read) as file:
        assert file.read() == "through"


@pytest.mark.parametrize(
    "change", [append, change_in_place, overwrite, remove, rename, make_new, make_folders, save_arrays, fail_as_usual]
)
def test_what_it_writes_it_reads_and_afterwards_all_is_as_before(folder: Path, change: Callable[[Path], None]) -> None:
    before, plain = read_all(folder), (open, os.open, os.stat, os.remove, os.replace, os.mkdir, torch.save)
    with private_files.keep_apart():
        change(folder / "log")
    assert read_all(folder) == before
    assert len(before) == len(list(folder.rglob("*")))
    assert (open, os.open, os.stat, os.remove, os.replace, os.mkdir, torch.save) == plain


def test_a_folder_that_another_process_has_filled_stays(folder: Path) -> None:
    with private_files.keep_apart() as replaced:
        (folder / "runs").mkdir()
        write = next(plain for plain, _ in replaced if plain.__module__ in ("io", "_io"))
        write(folder / "runs" / "of others", "w").close()
    assert [path.name for path in (folder / "runs").iterdir()] == ["of others"]


def test_a_file_too_large_to_copy_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "MOST_BYTES", 4)
    with private_files.keep_apart():
        with (folder / "log").open("a") as file:
            file.write("mine")
        assert (folder / "log").read_text() == "mine"
    assert (folder / "log").read_text() == "log of others\n"
