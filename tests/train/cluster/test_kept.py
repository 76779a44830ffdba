"""What the store keeps of a job's folder: parameter servers find the parts of the checkpoint that the journal names."""

import pytest

from trueline.errors import StorageError
from trueline.train.cluster import kept
from trueline.train.cluster.store import JobStore
from trueline.train.job_dir import JobDir
from trueline.train.master.journal import Journal


def write_cut(folder: JobDir, step: int) -> None:
    for server in ("server-0", "server-1"):
        path = folder.path / kept.CUTS / f"step-{step}" / f"{server}.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{server} at {step}".encode())


@pytest.fixture
def folder(tmp_path):
    made = JobDir(tmp_path / "job")
    made.path.mkdir()
    made.settings.write_text("{}")
    return made


@pytest.fixture
def journal(folder):
    made = Journal(folder.journal)
    yield made
    made.close()


def test_the_next_launch_has_the_parts_of_the_last_checkpoint_alone(tmp_path, folder, journal):
    store = JobStore(tmp_path / "store")
    for step in (3, 7):
        write_cut(folder, step)
        journal.append(("CKPT", {"path": "x", "step": step}))
        kept.keep_files(store, folder, journal=True)
    write_cut(folder, 9)  # of a checkpoint that is being written
    kept.keep_files(store, folder, journal=True)
    (tmp_path / "next").mkdir()
    assert kept.restore_files(store, tmp_path / "next")
    found = {path.parent.name: path.read_text() for path in (tmp_path / "next" / kept.CUTS).rglob("server-1.part")}
    assert found == {"step-7": "server-1 at 7"}
    assert kept.copy_journal(JobDir(tmp_path / "next"))[1] == 7


def test_parts_that_go_while_they_are_copied_are_those_of_the_next_checkpoint(tmp_path, folder, journal):
    class Replaced(JobStore):
        """Meanwhile the master has the next checkpoint, and removes the parts of this one."""

        def names(self, name):
            if (folder.path / kept.CUTS / "step-3").exists():
                for path in (folder.path / kept.CUTS / "step-3").iterdir():
                    path.unlink()
                (folder.path / kept.CUTS / "step-3").rmdir()
                write_cut(folder, 7)
                journal.append(("CKPT", {"path": "x", "step": 7}))
            return super().names(name)

    write_cut(folder, 3)
    journal.append(("CKPT", {"path": "x", "step": 3}))
    store = Replaced(tmp_path / "store")
    kept.keep_files(store, folder, journal=True)
    assert store.names("kept/cuts") == {"step-7.server-0.part", "step-7.server-1.part"}


def test_a_job_without_a_journal_or_a_checkpoint_keeps_what_it_has(tmp_path, folder):
    store = JobStore(tmp_path / "store")
    kept.keep_files(store, folder, journal=True)
    assert store.names("kept") == {"job.json"}
    Journal(folder.journal).close()
    kept.keep_files(store, folder, journal=True)
    assert store.names("kept") == {"job.json", "journal.sqlite"}
    assert not isinstance(store.get("kept/journal.sqlite"), StorageError)
