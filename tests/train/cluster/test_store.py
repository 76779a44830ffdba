"""A job's store, in a folder and in an object store: what is made once, and what grows."""

import uuid

import pytest

from trueline.engine.cluster.settings import LocalSettings, PodmanSettings, SlurmSettings
from trueline.engine.hosts.token import TokenFile
from trueline.errors import StorageError, UsageError
from trueline.storage.location import join_location
from trueline.train.cluster import operate
from trueline.train.cluster.store import (
    JobLaunch,
    JobStore,
    JoinKit,
    LaunchEnd,
    LaunchStatus,
    Order,
    OrderAnswer,
    SubmittedJob,
)


@pytest.fixture(params=["folder", "objects"])
def top(request, tmp_path):
    return tmp_path if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def store(top):
    return JobStore(join_location(top, "digits-1"))


@pytest.fixture
def other(store):
    """The same store as another process sees it."""
    return JobStore(store.where)


def launch(number: int = 1) -> JobLaunch:
    return JobLaunch(number=number, on="slurm", engine=SlurmSettings(partition="cpu"), submitted=1.0)


def end(why: str) -> LaunchEnd:
    return LaunchEnd(outcome="stopped", why=why, ended=2.0)


def test_of_two_clients_one_begins_a_launch_and_one_ends_it(store, other):
    assert store.last_launch() is None
    assert store.begin_launch(launch())
    assert not other.begin_launch(JobLaunch(number=1, on="local", engine=LocalSettings(), submitted=2.0))
    assert other.last_launch() == launch()
    assert other.read_end(1) is None
    assert other.end_launch(1, end("first"))
    assert not store.end_launch(1, end("second"))
    assert store.read_end(1).why == "first"
    assert store.begin_launch(launch(2))
    assert other.last_launch().number == 2


@pytest.mark.parametrize(
    "engine", [LocalSettings(capacity=3), SlurmSettings(options=("--x",)), PodmanSettings(image="i")], ids=str
)
def test_the_settings_of_each_engine_travel_with_the_launch(store, other, engine):
    store.begin_launch(JobLaunch(number=1, on="x", engine=engine, submitted=1.0))
    assert other.last_launch().engine == engine


def test_orders_are_read_in_their_order_until_they_have_an_answer(store, other):
    names = [other.give_order(1, Order(workers=workers, why="x", given=1.0)) for workers in (3, 5, 0)]
    other.give_order(2, Order(why="of the next launch", given=1.0))
    assert [(name, order.workers) for name, order in store.list_orders(1)] == list(zip(names, (3, 5, 0), strict=True))
    store.answer_order(names[0], OrderAnswer(fault="too few"))
    assert [name for name, _ in store.list_orders(1)] == names[1:]
    assert other.read_answer(names[0]).fault == "too few"
    assert other.read_answer(names[1]) is None


def test_a_log_grows_for_every_reader_and_across_writers(store, other):
    assert other.read_log("logs/events.log") == b""
    store.append("logs/events.log", b"one\n")
    assert other.read_log("logs/events.log") == b"one\n"
    store.append("logs/events.log", b"two\n")
    other.append("logs/events.log", b"three\n")
    store.append("logs/events.log.1.log", b"another log\n")
    assert other.read_log("logs/events.log") == store.read_log("logs/events.log") == b"one\ntwo\nthree\n"


def test_status_is_replaced_and_the_token_goes_with_the_launch(store, other):
    for step in (1, 2):
        store.write_status(1, LaunchStatus(leader="head", host="a", step=step, at=float(step)))
    assert other.read_status(1).step == 2
    store.write_kit(1, JoinKit(address="a:1", token=TokenFile(job="j", token="t", ca="c")))
    assert other.read_kit(1).address == "a:1"
    store.end_launch(1, end("over"))
    assert other.read_kit(1) is None


def test_a_torn_record_is_named(store):
    store.write("launches/0001.end.json", b'{"outcome":')
    with pytest.raises(StorageError, match=r"0001\.end\.json cannot be read"):
        store.read_end(1)


def test_only_jobs_are_found_and_a_missing_one_lists_those_that_exist(store, top):
    job = SubmittedJob(name="digits-1", id="ab", recipe="r", files=(), workers="1", settings={}, submitted=1.0)
    store.write_record("submitted.json", job, replace=False)
    store.begin_launch(launch())
    store.end_launch(1, end("over"))
    JobStore(join_location(top, "else")).write("notes.txt", b"x")
    assert [one.name for one in operate.list_jobs(top)] == ["digits-1"]
    assert operate.find("digits-1", [top]).where == store.where
    assert operate.find(str(store.where), []).where == store.where
    assert operate.find("digits-2", [top]) is None
    assert "did you mean 'digits-1'?" in operate.describe_missing("digits-2", [top]).hint
    with pytest.raises(UsageError, match="holds no job"):
        JobStore(join_location(top, "else")).read_job()


def test_what_a_local_store_holds_is_for_its_user_alone(tmp_path):
    store = JobStore(tmp_path / "digits-1")
    store.write_kit(1, JoinKit(address="a:1", token=TokenFile(job="j", token="t", ca="c")))
    (file,) = (tmp_path / "digits-1" / "launches").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_leader_writes_where_hosts_join_again_if_another_one_began_to_lead_and_gave_up(store, other):
    own, wrong = (
        JoinKit(address=f"10.0.0.{number}:7000", token=TokenFile(job="digits-1", token="t", ca="c"))
        for number in (1, 2)
    )
    store.begin_launch(launch())
    store.write_kit(1, own)
    other.write_kit(1, wrong)
    store.keep_kit(1, own)
    assert other.read_kit(1) == own
    other.end_launch(1, end("halted"))
    store.keep_kit(1, own)
    assert other.read_kit(1) is None, "it is a secret, and the launch has ended"
