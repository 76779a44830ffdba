"""The state of a submitted job: what the store has, and what the scheduler says."""

import pytest

from trueline.engine.cluster.contract import SubmissionReport, SubmissionState
from trueline.engine.cluster.settings import LocalSettings, SlurmSettings
from trueline.train.cluster.operate import FRESH_S, Listing, judge, list_launch, read
from trueline.train.cluster.store import HostStatus, JobLaunch, JobStore, LaunchEnd, LaunchStatus, SubmittedJob

QUEUED, RUNNING, ENDED = SubmissionState.QUEUED, SubmissionState.RUNNING, SubmissionState.ENDED
NOW = 1000.0
FRESH, OLD = (LaunchStatus(leader="head", host="n1", at=NOW - age) for age in (1.0, FRESH_S + 1))


def listing(state: SubmissionState | None, *, hosts: bool = False, reason: str = "why") -> Listing:
    head = None if state is None else SubmissionReport(name="a.1.head", state=state, reason=reason, node="n1")
    return Listing(head, hosts)


@pytest.mark.parametrize(
    ("status", "listed", "state", "why"),
    [
        (None, listing(QUEUED), "queued", "why"),
        (None, listing(RUNNING), "starting", "its head starts on n1"),
        (None, listing(ENDED), "dead", "its head wrote nothing; its head has ended: why"),
        (None, listing(None), "dead", "its head wrote nothing; its head has ended: the scheduler lists it no more"),
        (None, None, "silent", "its head wrote nothing, and the scheduler does not answer"),
        (FRESH, listing(RUNNING), "running", ""),
        (FRESH, None, "running", ""),
        (FRESH, listing(ENDED, hosts=True), "running", ""),  # a host may lead
        (FRESH, listing(ENDED), "dead", "nothing came from n1 for 1 s; its head has ended: why"),
        (OLD, listing(ENDED, hosts=True), "dead",
         "nothing came from n1 for 16 s; its head has ended, and no host has taken the job over"),
        (OLD, listing(RUNNING), "silent",
         "nothing came from n1 for 16 s, while the scheduler lists its head as running"),
        (OLD, None, "silent", "nothing came from n1 for 16 s, and the scheduler does not answer"),
    ],
)  # fmt: skip
def test_a_launch_without_an_end_is_judged_by_its_last_status_and_by_the_scheduler(status, listed, state, why):
    assert judge(None, status, listed, NOW) == (state, why)


@pytest.mark.parametrize("listed", [None, listing(RUNNING), listing(ENDED)])
def test_an_end_in_the_store_counts_whatever_the_scheduler_says(listed):
    end = LaunchEnd(outcome="stopped", why="trueline halt", ended=NOW)
    assert judge(end, FRESH, listed, NOW) == ("stopped", "trueline halt")


def test_why_hosts_of_a_running_job_wait_is_shown():
    hosts = (HostStatus(role="head", state="here"), HostStatus(role="host-1", state="queued", reason="no cores"))
    status = LaunchStatus(leader="head", host="n1", at=NOW, hosts=hosts)
    assert judge(None, status, listing(RUNNING), NOW) == ("running", "host-1 queued: no cores")


def test_processes_of_another_machine_are_unknown_and_not_dead(tmp_path):
    launch = JobLaunch(number=1, on="local", engine=LocalSettings(), machine="elsewhere", submitted=NOW)
    assert list_launch(JobStore(tmp_path), launch) is None


def test_a_client_without_the_commands_of_the_engine_knows_a_job_by_its_store_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    where = JobStore(tmp_path / "a-1")
    job = SubmittedJob(name="a-1", id="ab", recipe="r", files=(), workers="1", settings={}, submitted=NOW)
    where.write_record("submitted.json", job)
    where.begin_launch(JobLaunch(number=1, on="slurm", engine=SlurmSettings(), submitted=NOW))
    where.write_status(1, FRESH)
    assert read(where, NOW).state == "running"
    assert read(where, NOW + 2 * FRESH_S).state == "silent"
