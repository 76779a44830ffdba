"""What a leader writes to the store, and in which order."""

import json
from types import SimpleNamespace

import pytest

from trueline.engine.cluster.settings import LocalSettings
from trueline.errors import StorageError
from trueline.train.cluster import duties as duties_module
from trueline.train.cluster import kept
from trueline.train.cluster.duties import LeaderDuties
from trueline.train.cluster.store import JobLaunch, JobStore, SubmittedJob
from trueline.train.job_dir import JobDir
from trueline.train.master.journal import Journal
from trueline.train.settings import JobSettings, save
from worlds.waiting import until

EVENTS = "logs/events.log"


class RecordingStore(JobStore):
    """Notes at each piece of events which checkpoint another launch would continue from."""

    def append(self, name, data):
        if name == EVENTS:
            journal = self.get(kept.JOURNAL)
            self.seen.append((json.loads(data)["name"], b"CKPT" in (journal or b"")))
        super().append(name, data)


@pytest.fixture
def duties(tmp_path):
    folder = JobDir(tmp_path / "job")
    folder.path.mkdir()
    save(JobSettings(recipe="tiny", name="tiny-1", recipe_digest="", workers=1), folder.path)
    store = RecordingStore(tmp_path / "store")
    store.seen = []
    engine = LocalSettings()
    job = SubmittedJob(
        name="tiny-1", id="a1", recipe="recipe.py", files=(), workers="1", settings={}, submitted=0.0, servers=1
    )
    launch = JobLaunch(number=1, on="local", engine=engine, submitted=0.0)
    assert store.begin_launch(launch)
    leader = SimpleNamespace(
        folder=folder, settings=SimpleNamespace(workers=1), inherited_bytes=0, emit=lambda *_, **__: None, on_event=None
    )
    made = LeaderDuties(store, job, launch, SimpleNamespace(list=lambda _: []), role="head", leader=leader)
    yield made, store, folder
    made.end(None)


def test_a_checkpoint_that_cannot_be_kept_does_not_make_a_job_look_dead(duties, monkeypatch):
    made, store, _ = duties

    def refuse(*_, **__):
        raise StorageError("the checkpoints change faster than they can be copied")

    keep = duties_module.keep_files
    monkeypatch.setattr(duties_module, "keep_files", lambda *given, journal: refuse() if journal else None)
    made.begin()
    until(lambda: store.read_status(1) is not None, lambda: made._away)
    assert list(made._away) == ["the copy of a checkpoint"]
    monkeypatch.setattr(duties_module, "keep_files", keep)


def test_what_continues_from_a_checkpoint_is_in_the_store_before_users_see_that_it_is_saved(duties):
    made, store, folder = duties
    journal = Journal(folder.journal)
    made.begin()
    for step, event in enumerate(("job.started", "checkpoint.saved"), start=1):
        if event == "checkpoint.saved":
            journal.append(("CKPT", {"path": "x", "step": 7}))
        with folder.events.open("a") as file:
            file.write(json.dumps({"at": 0.0, "name": event, "fields": {"step": 7}}) + "\n")
        until(lambda step=step: len(store.seen) == step, store.seen)
    journal.close()
    assert store.seen == [("job.started", False), ("checkpoint.saved", True)]
