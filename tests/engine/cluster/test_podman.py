"""podman: the shared suite on containers over this machine's files, and what it reports in words."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.scheduler import *  # noqa: F403 - the shared suite
from conformance.scheduler import ENDED, POLITE, RUNNING, Scheduled
from conformance.scheduler_logs import *  # noqa: F403
from conformance.scheduler_queue import *  # noqa: F403
from trueline.engine.cluster.contract import Submission
from trueline.engine.cluster.local import KeptProcess, SubmissionFolder
from trueline.engine.cluster.podman import PodmanScheduler, make_command
from trueline.engine.cluster.settings import PodmanSettings
from trueline.errors import UsageError
from worlds.podman import CONFIG, find_lack
from worlds.waiting import until

pytestmark = pytest.mark.slow
SETTINGS = PodmanSettings(rootfs="/", capacity=2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    if lack := find_lack():
        pytest.skip(f"no podman here: {lack}")
    (tmp_path / "containers.conf").write_text(CONFIG)
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    return tmp_path / "cache" / "trueline" / "podman-engine"


@pytest.fixture
def other_client(folder):
    return PodmanScheduler(SETTINGS, folder)


@pytest.fixture
def scheduled(folder, tmp_path):
    world = Scheduled(PodmanScheduler(SETTINGS, folder), tmp_path, waits_for="2", gangs=True)
    yield world
    for name in SubmissionFolder(folder).names():
        world.scheduler.cancel(name, grace=False)
        world.wait(name, ENDED)


@pytest.mark.jobs
def test_an_image_that_cannot_be_pulled_is_named(folder, tmp_path):
    scheduler = PodmanScheduler(PodmanSettings(image="localhost:1/no/such:image"), folder)
    world = Scheduled(scheduler, tmp_path)
    reason = world.wait(world.submit("head", "true"), ENDED).reason
    assert reason.startswith("podman could not start it: ")
    assert "localhost:1" in reason


def test_a_container_whose_keeper_was_killed_is_listed_and_ended(scheduled, folder):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    kept = [SubmissionFolder(folder).read(name, kind, KeptProcess) for kind in ("pid", "run")]
    subprocess.run(["kill", "-9", *(str(one.pid) for one in kept)], check=True)
    until(lambda: not any(one.alive for one in kept), "the end of keeper and client")
    assert scheduled.find(name).state is RUNNING
    subprocess.run(["podman", "kill", name], check=True, capture_output=True)
    scheduled.wait(name, ENDED)


def test_a_submission_from_inside_of_a_container_is_started_by_the_keeper_of_its_job(scheduled, folder, monkeypatch):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    monkeypatch.setenv("TRUELINE_KEPT", "1")
    host = scheduled.submit("host-1", "echo began")
    scheduled.wait(host, ENDED)
    assert scheduled.scheduler.read_log(host) == b"began\n"


def test_the_command_has_what_the_settings_say_and_no_way_to_podman(tmp_path):
    submission = Submission(
        name="a-1.1.head", command=("p", "-m", "x", str(tmp_path), "1"), log=f"{tmp_path}/logs/x.log", memory_mb=500
    )
    settings = PodmanSettings(image="i:1", mounts=("/data", "/a:/b:ro"), env=("AWS_PROFILE",), options=("--gpus=all",))
    command = make_command(submission, settings, Path("/c/trueline/podman-engine"))
    shown = [
        f"--volume={tmp_path}:{tmp_path}", "--volume=/data:/data", "--volume=/a:/b:ro", "--env=AWS_PROFILE",
        "--memory=500m", "--gpus=all", "--env=XDG_CACHE_HOME=/c",
    ]  # fmt: skip
    assert {*shown} <= {*command}
    assert command[-6:] == ["i:1", *submission.command]
    assert "podman.sock" not in json.dumps(command)


def test_without_an_image_the_setting_is_named():
    with pytest.raises(UsageError, match="podman needs an image"):
        PodmanScheduler(PodmanSettings())
    assert shutil.which("podman") or find_lack()
