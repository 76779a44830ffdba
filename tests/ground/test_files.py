"""Promises of the files that are whole or absent."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from trueline import errors, events, files


def full_disk(*_):
    raise OSError(28, os.strerror(28))


def test_a_file_is_replaced_whole(tmp_path):
    target = tmp_path / "deep" / "file"
    files.write_atomic(target, b"one")
    files.write_atomic(target, b"two", mode=0o600)
    assert target.read_bytes() == b"two"
    assert target.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in target.parent.iterdir()] == ["file"]


def no_links(*_):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("link", [os.link, no_links])
def test_a_file_that_is_there_stays_when_it_is_not_to_be_replaced(tmp_path, monkeypatch, link):
    monkeypatch.setattr(os, "link", link)
    target = tmp_path / "deep" / "file"
    assert files.write_atomic(target, b"one", mode=0o600, replace=False)
    assert not files.write_atomic(target, b"two", replace=False)
    assert target.read_bytes() == b"one"
    assert target.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in target.parent.iterdir()] == ["file"]


def test_of_many_writers_at_the_same_moment_one_has_written_the_file(tmp_path):
    start = threading.Barrier(8)

    def writing(number):
        start.wait()
        return files.write_atomic(tmp_path / "file", b"%d" % number, replace=False)

    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(writing, range(8)))
    assert sum(written) == 1
    assert (tmp_path / "file").read_bytes() == b"%d" % written.index(True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_content_and_says_how_much_room_there_is(tmp_path, monkeypatch, call):
    target = tmp_path / "file"
    files.write_atomic(target, b"old")
    monkeypatch.setattr(os, call, full_disk)
    with pytest.raises(errors.StorageError, match=r"no room left to write .*file \([\d.]+ MiB free\)"):
        files.write_atomic(target, b"new")
    assert target.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with files.atomic_dir(tmp_path / "done") as partial:
        (partial / "a").write_text("1")
    assert (tmp_path / "done" / "a").read_text() == "1"
    with pytest.raises(errors.StorageError), files.atomic_dir(tmp_path / "broken") as partial:
        partial.mkdir()
    assert [entry.name for entry in tmp_path.iterdir()] == ["done"]


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old").write_text("")
    with pytest.raises(errors.StorageError, match="exists already"), files.atomic_dir(tmp_path / "there"):
        raise AssertionError("not reached")
    with files.atomic_dir(tmp_path / "there", replace=True) as partial:
        (partial / "new").write_text("")
    assert [entry.name for entry in (tmp_path / "there").iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]


def test_a_writer_that_is_killed_leaves_only_what_sweep_removes(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from trueline import files\n"
        "with files.atomic_dir(Path(sys.argv[1]) / 'done') as partial:\n"
        "    (partial / 'a').write_text('1'); os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert not (tmp_path / "done").exists()
    assert files.sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_named(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", denied)
    with pytest.raises(errors.StorageError, match=r"cannot write .*file: Permission denied") as caught:
        files.write_atomic(tmp_path / "file", b"")
    assert caught.value.hint == "choose a folder that you may write to"


def test_listeners_hear_events_while_their_block_runs():
    heard = []
    with events.listening(lambda name, fields: heard.append((name, fields))):
        events.emit("lease.expired", lease=41, held_s=30.25)
    events.emit("lease.expired", lease=42)
    assert heard == [("lease.expired", {"lease": 41, "held_s": 30.25})]
    assert events.render(*heard[0]) == "lease.expired lease=41 held_s=30.25"


def test_every_error_has_its_own_code_and_request_errors_a_status():
    def below(kind):
        return [kind, *(found for child in kind.__subclasses__() for found in below(child))]

    kinds = [kind for kind in below(errors.TruelineError) if kind.__module__ == errors.__name__]
    codes = [kind.code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert all(400 <= kind.status < 600 for kind in kinds if issubclass(kind, errors.RequestError))
    drawn = errors.__doc__
    assert [kind.__name__ for kind in kinds if kind.__name__ not in drawn] == []


def test_a_limit_on_the_length_of_files_is_said_with_what_lifts_it(tmp_path, monkeypatch):
    def too_long(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "fsync", too_long)
    with pytest.raises(errors.StorageError, match="longer than this process may write") as refused:
        files.write_atomic(tmp_path / "file", b"new")
    assert "ulimit -f" in refused.value.hint
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def disk(monkeypatch):
    """What a writer asks of the disk, in order: (call, name), of a name under construction only that it is one."""
    asked = []

    def shown(path):
        name = os.path.basename(os.fspath(path))
        return "partial" if name.startswith(files.PARTIAL) else name

    def recording(call, of):
        real = getattr(os, call)

        def recorded(*args, **more):
            asked.append((call, *of(*args)))
            return real(*args, **more)

        monkeypatch.setattr(os, call, recorded)

    recording("fsync", lambda handle: [shown(os.readlink(f"/proc/self/fd/{handle}"))])
    for call in ("replace", "rename", "link"):
        recording(call, lambda source, target: [shown(source), shown(target)])
    return asked


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_the_writer_goes_on(tmp_path, disk):
    files.write_atomic(tmp_path / "folder" / "file", b"one")
    assert disk == [("fsync", "partial"), ("replace", "partial", "file"), ("fsync", "folder")]


def test_a_file_that_is_written_piece_by_piece_goes_the_same_way(tmp_path, disk):
    with files.atomic_file(tmp_path / "folder" / "file") as file:
        file.write(b"one")
        assert disk == []
    assert disk == [("fsync", "partial"), ("replace", "partial", "file"), ("fsync", "folder")]
    assert (tmp_path / "folder" / "file").read_bytes() == b"one"
    assert (tmp_path / "folder" / "file").stat().st_mode & 0o777 == 0o644


def test_a_file_that_takes_no_others_place_is_on_the_disk_before_its_name_too(tmp_path, disk):
    files.write_atomic(tmp_path / "folder" / "file", b"one", replace=False)
    assert disk == [("fsync", "partial"), ("link", "partial", "file"), ("fsync", "folder")]


def test_each_file_and_folder_of_a_tree_is_on_the_disk_before_the_trees_name(tmp_path, disk):
    with files.atomic_dir(tmp_path / "parent" / "tree") as partial:
        (partial / "deep" / "deeper").mkdir(parents=True)
        for name in ("a", "deep/b", "deep/deeper/c"):
            (partial / name).write_text(name)
    *before, name, last = disk
    assert (name, last) == (("rename", "partial", "tree"), ("fsync", "parent"))
    assert sorted(before) == [("fsync", name) for name in ("a", "b", "c", "deep", "deeper", "partial")]
    for folder, inner in (("partial", "a"), ("deep", "b"), ("deeper", "c")):
        assert before.index(("fsync", inner)) < before.index(("fsync", folder))


def test_a_tree_that_takes_anothers_place_is_on_the_disk_before_the_old_one_moves(tmp_path, disk, monkeypatch):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "old").write_text("")
    with files.atomic_dir(tmp_path / "tree", replace=True) as partial:
        (partial / "new").write_text("")
    assert disk == [("fsync", "new"), ("fsync", "partial"), ("fsync", tmp_path.name)]
    disk.clear()
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    with files.atomic_dir(tmp_path / "tree", replace=True) as partial:
        (partial / "newer").write_text("")
    assert disk == [
        ("fsync", "newer"),
        ("fsync", "partial"),
        ("rename", "tree", ".old-tree"),
        ("rename", "partial", "tree"),
        ("fsync", tmp_path.name),
    ]


def test_a_file_that_cannot_be_finished_leaves_the_old_content_and_nothing_beside_it(tmp_path, monkeypatch):
    target = tmp_path / "file"
    files.write_atomic(target, b"old")
    with pytest.raises(AttributeError), files.atomic_file(target) as file:
        file.write_nothing()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(errors.StorageError, match="no room left"), files.atomic_file(target) as file:
        file.write(b"new")
    assert target.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("replace", [True, False])
def test_all_bytes_are_in_the_file_when_it_is_sent_to_the_disk(tmp_path, monkeypatch, replace):
    real, sizes = os.fsync, []

    def measured(handle):
        if not os.path.isdir(f"/proc/self/fd/{handle}"):
            sizes.append(os.fstat(handle).st_size)
        return real(handle)

    monkeypatch.setattr(os, "fsync", measured)
    files.write_atomic(tmp_path / "a", b"x" * 1000, replace=replace)
    with files.atomic_file(tmp_path / "b") as file:
        file.write(b"y" * 1000)
    assert sizes == [1000, 1000]


def test_a_file_is_for_all_to_read_unless_another_mode_is_asked_for(tmp_path):
    files.write_atomic(tmp_path / "usual", b"")
    files.write_atomic(tmp_path / "usual", b"again")
    files.write_atomic(tmp_path / "kept", b"", mode=0o600)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("usual", "kept")] == [0o644, 0o600]


@pytest.mark.parametrize(("umask", "file", "folder"), [(0, 0o644, 0o755), (0o027, 0o640, 0o750), (0o077, 0o600, 0o700)])
def test_a_umask_takes_rights_from_others_and_never_gives_them_the_right_to_write(tmp_path, umask, file, folder):
    before = os.umask(umask)
    try:
        files.write_atomic(tmp_path / "file", b"")
        with files.atomic_dir(tmp_path / "tree") as partial:
            (partial / "inner").mkdir()
            (partial / "inner" / "file").write_bytes(b"")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert (modes[tmp_path / "file"], modes[tmp_path / "tree"]) == (file, folder)
    assert not any(mode & 0o002 or mode & umask for mode in modes.values())


def test_the_digest_of_a_file_is_of_all_of_it(tmp_path):
    content = bytes(range(256)) * 8200  # more than two mebibytes, and lines in it
    (tmp_path / "file").write_bytes(content)
    assert files.sha256_file(tmp_path / "file") == files.sha256_bytes(content)
    assert files.sha256_bytes(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_tree_is_taken_apart_only_when_another_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "old").write_text("")
    seen = []
    real = shutil.rmtree

    def watched(path, **more):
        seen.append(sorted(entry.name for entry in (tmp_path / "tree").iterdir()))
        return real(path, **more)

    monkeypatch.setattr(shutil, "rmtree", watched)
    with files.atomic_dir(tmp_path / "tree", replace=True) as partial:
        (partial / "new").write_text("")
    assert seen == [["new"]]


def test_the_cache_lies_where_the_environment_says_and_else_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "else"))
    assert files.user_cache() == tmp_path / "else" / "trueline"
    assert files.user_cache().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert files.user_cache() == tmp_path / ".cache" / "trueline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.user_cache() == tmp_path / ".cache" / "trueline"


OTHER_DISK = "free some space, or write to another disk, and try again"
OTHER_FOLDER = "choose a folder that you may write to"
BROKEN_DISK = "look at the disk or its connection (dmesg), or write to another one, and try again"
OPEN_FILES = "raise the limit of open files (ulimit -n), or have the code close those that it opens, and try again"


@pytest.mark.parametrize(
    ("number", "message", "hint"),
    [
        (errno.ENOSPC, "no room left to write {path} (3.5 MiB free); nothing was changed", OTHER_DISK),
        (errno.EDQUOT, "no room left to write {path} (3.5 MiB free); nothing was changed", OTHER_DISK),
        (
            errno.EFBIG,
            "cannot write {path}: a file in it is longer than this process may write; nothing was changed",
            "raise the limit (ulimit -f), or write to a file system that takes longer files",
        ),
        (errno.EROFS, "cannot write {path}: the reason; nothing was changed", OTHER_FOLDER),
        (errno.EACCES, "cannot write {path}: the reason; nothing was changed", OTHER_FOLDER),
        (errno.EPERM, "cannot write {path}: the reason; nothing was changed", OTHER_FOLDER),
        (errno.EIO, "writing {path} failed: the reason; nothing was changed", BROKEN_DISK),
        (errno.ESTALE, "writing {path} failed: the reason; nothing was changed", BROKEN_DISK),
        (errno.EMFILE, "writing {path} failed: the reason; nothing was changed", OPEN_FILES),
        (errno.ENOTDIR, "writing {path} failed: the reason; nothing was changed", "choose another folder"),
        (errno.EINVAL, "writing {path} failed: the reason; nothing was changed", ""),
    ],
)
def test_what_a_disk_refuses_is_said_with_the_path_and_what_to_do(tmp_path, monkeypatch, number, message, hint):
    asked = []

    def usage(folder):
        asked.append(folder)
        return SimpleNamespace(total=2**40, used=2**40, free=7 * 2**19)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    path = tmp_path / "not" / "there"
    found = files.storage_error(OSError(number, "the reason"), path)
    assert (found.message, found.hint) == (message.format(path=path), hint)
    assert asked == ([tmp_path] if "free)" in message else [])


def test_an_error_without_a_number_is_said_in_its_own_words(tmp_path):
    found = files.storage_error(OSError("the store is gone"), tmp_path)
    assert found.message == f"writing {tmp_path} failed: the store is gone; nothing was changed"


def test_a_disk_that_does_not_say_its_room_is_still_said_to_be_full(tmp_path, monkeypatch):
    def unknown(folder):
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr(shutil, "disk_usage", unknown)
    found = files.storage_error(OSError(errno.ENOSPC, "full"), tmp_path)
    assert found.message == f"no room left to write {tmp_path} (an unknown amount free); nothing was changed"


def test_sweeping_removes_files_and_folders_under_construction_and_nothing_else(tmp_path, monkeypatch):
    for name in (".partial-a", ".partial-b", "kept"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_text("")
    for name in (".partial-c", "file.partial-", "partial-d"):
        (tmp_path / name).write_text("")
    found = [*tmp_path.glob(files.PARTIAL + "*"), tmp_path / ".partial-gone"]
    monkeypatch.setattr(type(tmp_path), "glob", lambda folder, pattern: iter(found))
    assert files.sweep(tmp_path) == 4, "one of them was removed by another at this moment"
    assert sorted(os.listdir(tmp_path)) == ["file.partial-", "kept", "partial-d"]
    assert (tmp_path / "kept" / "deep" / "file").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from trueline import files
point, place = sys.argv[1], Path(sys.argv[2])
if point != "exchange":
    files._exchange = lambda one, other: False
rename, rmtree = os.rename, files.shutil.rmtree
def strike(): os.kill(os.getpid(), signal.SIGKILL)
def renamed(source, target):
    rename(source, target)
    if Path(target).name.startswith(".old-") == (point == "between"): strike()
os.rename = renamed
files.shutil.rmtree = lambda *_, **more: strike()
with files.atomic_dir(place, replace=True) as partial:
    (partial / "new").write_text("")
"""


@pytest.mark.parametrize(("point", "held"), [("between", "old"), ("after", "new"), ("exchange", "new")])
def test_a_writer_that_is_killed_while_it_replaces_a_tree_leaves_the_old_or_the_new_one(tmp_path, point, held):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "old").write_text("")
    process = subprocess.run([sys.executable, "-c", KILLED, point, str(tmp_path / "tree")], check=False)
    assert process.returncode == -9
    files.sweep(tmp_path)
    assert [entry.name for entry in (tmp_path / "tree").iterdir()] == [held]
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree"]


def test_a_lock_is_for_its_user_alone_and_follows_no_link(tmp_path):
    with files.hold_lock(tmp_path / "lock"):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
        with pytest.raises(BlockingIOError), files.hold_lock(tmp_path / "lock", wait=False):
            pass
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "trap").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"), files.hold_lock(tmp_path / "trap"):
        pass
    assert victim.read_text() == "precious"


# temporary folders


def test_a_temporary_folder_is_deleted_once_its_process_is_dead_and_never_before(tmp_path: Path) -> None:
    mine = files.TemporaryFolder("archive", tmp_path)
    code = (
        "import sys; from trueline import files; one = files.TemporaryFolder('bundle', sys.argv[1]); "
        "print(one.path, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "inner").mkdir()
        assert files.sweep_temporary(tmp_path) == 0, "both live, however young or old they are"
        assert (files.is_held(mine.path), files.is_held(theirs)) == (True, True)
        other.kill()
    assert files.is_held(theirs) is False
    assert files.sweep_temporary(tmp_path) == 1
    assert (mine.path.is_dir(), theirs.exists()) == (True, False)
    mine.remove()
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_follows_no_link_and_leaves_other_names_alone(tmp_path: Path) -> None:
    (tmp_path / "other" / "trueline-archive-x").mkdir(parents=True)
    (tmp_path / "trueline-archive-link").symlink_to(tmp_path / "other")
    (tmp_path / "trueline-own-work").mkdir()
    (tmp_path / "trueline-archive-file").write_text("")
    assert files.sweep_temporary(tmp_path) == 0
    assert len(list(tmp_path.rglob("*"))) == 5


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep may run at any moment; between the two calls the folder is empty, and nothing is lost."""
    steps, real = ["before opening", "before locking", "not at all"], files._open_dir

    def open_dir(folder: Path) -> int:
        monkeypatch.setattr(files, "_open_dir", real)
        step = steps.pop(0)
        if step == "before opening":
            assert files.sweep_temporary(tmp_path) == 1
        handle = real(folder)
        if step == "before locking":
            assert files.sweep_temporary(tmp_path) == 1
        monkeypatch.setattr(files, "_open_dir", open_dir)
        return handle

    monkeypatch.setattr(files, "_open_dir", open_dir)
    with files.TemporaryFolder("state", tmp_path) as folder:
        assert steps == []
        assert folder.is_dir()
        assert files.is_held(folder)
