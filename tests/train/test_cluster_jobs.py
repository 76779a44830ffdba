"""Submitted jobs on real engines: local processes; podman, Ray, Slurm and Kubernetes where they are installed."""

import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch

from trueline.checkpoint import checkpoint
from trueline.recipe.load import load_recipe
from worlds import slurm as slurms
from worlds.engine_clients import *  # noqa: F403 - the fixture `engine` and what it needs
from worlds.jobs import TINY, plain_loop
from worlds.waiting import until

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(900)]  # a real cluster takes its time to start


def fill_slurm(slurm) -> None:
    for _ in slurms.NODES:
        slurm.call("sbatch", "--exclusive", "-N1", "-Jfill", "--output=/dev/null", "--wrap=exec sleep 1000")
    until(lambda: slurm.count_idle() == 0, lambda: slurm.call("sinfo"))


def test_a_job_is_submitted_followed_scaled_halted_and_resumed_by_clients_that_come_and_go(engine, client):
    job = client.submit(engine, "--workers", "1:2")
    client.wait_workers(2)
    facts = client.read()
    assert (facts["state"], facts["engine"]) == ("running", engine)
    assert {host["role"] for host in facts["hosts"]} == {"head", "host-1"}
    at = time.time()
    client.run("scale", job, "1")
    client.wait_workers(1, after=at)
    client.wait("host.ended", after=at)
    assert "0 hosts are enough" in client.run("logs", job)
    assert re.search(r"stopped .*after step \d+", client.run("halt", job))
    until(lambda: not client.processes(), "the end of all processes")
    steps, *wrong = client.count()
    assert wrong == [0, 0]
    assert client.read()["step"] == steps
    assert "is not running: it is stopped (trueline halt)" in client.run("halt", job, code=2)

    at = time.time()
    client.run("resume", job, "--workers", "2:2")
    client.wait_workers(2, after=at)
    client.run("halt", job)
    after, *wrong = client.count()
    assert wrong == [0, 0]
    assert after > steps
    assert "generation" in client.run("logs", job)
    assert "worker-0.0" in " ".join(os.listdir(client.store / job / "logs"))


def test_a_job_continues_on_another_host_when_the_host_of_its_head_takes_its_cores_back(client):
    client.lend("a", cores=1)
    job = client.submit("hosts", "--workers", "1:2")
    client.wait_workers(1)
    client.lend("b", cores=1)
    client.wait_workers(2)
    at = time.time()
    client.lenders["a"].send_signal(signal.SIGINT)
    assert client.lenders["a"].wait(200) == 0
    client.wait_workers(1, after=client.wait("job.restored", after=at))
    assert (client.read()["launch"], client.read()["state"]) == (2, "running")
    assert "stopped (trueline halt)" in client.run("halt", job)
    assert client.count()[1:] == (0, 0)
    assert client.where.last_launch().number == 2, "a job that a user halts does not queue again"
    until(lambda: not client.processes(), "the end of all processes")


def test_what_dies_is_replaced_and_no_record_is_lost_or_repeated(engine, client):
    job = client.submit(engine, "--workers", "1:2")
    client.wait_workers(2)

    at = time.time()
    client.kill("host-1")
    client.wait_workers(1, after=at)
    client.wait_workers(2, after=client.wait("host.joined", after=at, host="host-2"))

    at = time.time()
    client.kill("head")
    client.wait_workers(1, after=at)
    client.wait_workers(2, after=client.wait("host.joined", after=at, host="host-3"))
    assert client.read()["state"] == "running"
    client.run("halt", job)
    assert client.count()[1:] == (0, 0)
    until(lambda: not client.processes(), "the end of all processes")


def test_a_head_that_dies_alone_leaves_a_dead_job_that_resume_continues(engine, client):
    job = client.submit(engine, "--workers", "1:1")
    client.wait_workers(1)
    client.wait("checkpoint.saved")
    client.kill("head")
    facts = until(lambda: (one := client.read())["state"] == "dead" and one, lambda: client.read())
    assert "its head has ended" in facts["why"]
    at = time.time()
    client.run("resume", job)
    client.wait_workers(1, after=at)
    client.run("halt", job)
    assert client.count()[1:] == (0, 0)


@pytest.mark.parametrize(
    ("first", "then"), [("local", "slurm"), ("slurm", "local"), ("local", "ray"), ("ray", "local")]
)
def test_a_job_halts_on_one_engine_and_ends_on_another_with_the_same_parameters(
    first, then, client, request, tmp_path, monkeypatch
):
    request.getfixturevalue(f"{first if then == 'local' else then}_client")
    gate = tmp_path / "gate"
    client.env["TINY_GATE"] = f"10:{gate}"
    epochs, steps = 50, 400  # a minute and a half before the gate is open
    job = client.submit(first, "--workers", "2:2", epochs=epochs)
    client.wait("step.applied", step=12)
    client.run("halt", job)
    assert 12 <= client.read()["step"] < steps
    gate.touch()
    client.run("resume", job, "--on", then, "--workers", "1")
    assert client.wait_end().outcome == "finished"
    assert client.count() == (steps, 0, 0)
    monkeypatch.delenv("TINY_GATE", raising=False)
    recipe = load_recipe(TINY)
    expected = plain_loop(replace(recipe, defaults=replace(recipe.defaults, epochs=epochs)), steps)
    state = checkpoint.latest(client.where.checkpoints).state["model"]
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
    assert client.read()["state"] == "finished"
    assert "has finished already" in client.run("resume", job, code=2)


def test_a_node_of_slurm_that_dies_is_replaced_before_slurm_knows(slurm_client, slurm):
    client = slurm_client
    job = client.submit("slurm", "--workers", "1:3")
    client.wait_workers(3)
    node = slurm.call("squeue", "--noheader", f"--name={client.unique}.1.host-2", "--format=%N").strip()
    head = slurm.call("squeue", "--noheader", f"--name={client.unique}.1.head", "--format=%N").strip()
    assert node != head
    at = time.time()
    slurm.kill_node(node)
    client.wait("host.submitted", after=at)
    assert slurm.call("sinfo", "--noheader", "-N", "-n", node, "-p", "cpu", "-o", "%t").strip() in ("mix", "alloc")
    client.wait("step.applied", after=at)
    slurm.start_node(node)
    client.wait_workers(3, after=client.wait("host.joined", after=at))
    client.run("halt", job)
    assert client.count()[1:] == (0, 0)


def test_what_is_cancelled_behind_our_back_leaves_between_two_steps(slurm_client, slurm):
    client = slurm_client
    client.submit("slurm", "--workers", "1:2")
    client.wait_workers(2)
    at = time.time()
    slurm.call("scancel", f"--name={client.unique}.1.host-1")
    client.wait("host.leaving", after=at)
    client.wait_workers(2, after=client.wait("host.joined", after=at, host="host-2"))
    slurm.call("scancel", f"--name={client.unique}.1.head")
    end = client.wait_end()
    assert (end.outcome, end.why) == ("stopped", "the launcher got SIGTERM")
    assert client.count() == (end.step, 0, 0)
    until(lambda: not client.processes(), "the end of all processes")


def test_why_a_job_waits_is_shown_and_halt_withdraws_it(slurm_client, slurm):
    client = slurm_client
    fill_slurm(slurm)
    job = client.submit("slurm", "--workers", "1:2")
    shown = until(lambda: "free cores" in (text := client.run("jobs")) and text, lambda: client.run("jobs"))
    assert re.search(rf"{job} +slurm +queued .*it waits for free cores or memory \(Resources\)", shown)
    assert "is queued: it waits for free cores" in client.run("logs", job)
    assert "halted while it waited" in client.run("halt", job)
    assert client.unique not in slurm.call("squeue", "--noheader", "--format=%j")
    assert client.read()["state"] == "stopped"


@pytest.mark.timeout(900)
def test_two_jobs_that_each_hold_half_of_a_cluster_do_not_wait_for_each_other_forever(slurm_client, slurm):
    """Slurm starts heads and hosts one by one: each head gets a node, and both hosts wait. Both heads are in the queue
    before either can submit its host."""
    client = slurm_client
    (client.folder / "trueline.toml").write_text('[engine.slurm]\noptions = ["--exclusive"]\n')
    fill_slurm(slurm)
    jobs = [client.submit("slurm", "--workers", "2:2", epochs=1) for _ in range(2)]
    slurm.call("scancel", "--name=fill")
    launches = 0
    for client.job in jobs:
        until(lambda: client.read()["state"] == "finished", client.logs)
        assert client.count() == (8, 0, 0)
        launches += client.where.last_launch().number
    assert launches > 2, "one of them queued again"


def test_a_recipe_that_cannot_be_trained_fails_with_its_reason(engine, client):
    recipe = client.folder / "tiny" / "recipe.py"
    recipe.write_text(recipe.read_text().replace("def optimizer(", "def optimzer("))
    client.submit(engine)
    end = client.wait_end()
    assert end.outcome == "failed"
    assert "optimizer" in end.why
    assert "optimizer" in client.run("logs", client.job)


def test_two_jobs_that_each_need_all_slots_both_end_in_the_order_of_their_priority(client):
    (client.folder / "trueline.toml").write_text("[engine.local]\ncapacity = 2\n")
    gate = client.folder / "gate"
    client.env["TINY_GATE"] = f"1:{gate}"
    jobs = [client.submit("local", "--workers", "2:2", epochs=100)]  # minutes before the gate is open
    client.wait("step.applied")
    jobs += [client.submit("local", "--workers", "2:2", "--priority", str(priority), epochs=1) for priority in (1, 2)]
    until(lambda: "waits" in client.read()["why"], lambda: client.read())
    gate.touch()
    ended = []
    for client.job, steps in zip(jobs, (800, 8, 8), strict=True):
        end = client.wait_end()
        assert end.outcome == "finished", end
        ended.append(end.ended)
        assert client.count() == (steps, 0, 0)
    assert ended[0] < ended[2] < ended[1]


@pytest.mark.timeout(900)
def test_ten_jobs_on_two_slots_start_by_priority_and_all_end(client):
    (client.folder / "trueline.toml").write_text("[engine.local]\ncapacity = 2\n")
    first = client.submit("local", "--workers", "2:2")
    client.wait("step.applied")
    jobs = {
        client.submit("local", "--workers", "1", "--priority", str(priority), epochs=1): priority
        for priority in (3, 9, 1, 7, 5, 8, 2, 10, 4, 6)
    }
    client.job = next(job for job, priority in jobs.items() if priority == 9)
    until(lambda: "(priority 10)" in client.read()["why"], lambda: client.read())
    client.run("halt", first)
    names = []
    for client.job in jobs:
        assert client.wait_end().outcome == "finished"
        assert client.count() == (8, 0, 0)
        names.append(client.unique)
    by_priority = [name for _, name in sorted(zip(jobs.values(), names, strict=True), reverse=True)]
    folder = client.folder / "cache" / "trueline" / "local-engine"
    started = [(folder / f"{name}.1.head.run").stat().st_mtime for name in by_priority]
    assert started == sorted(started)  # two may have started within the resolution of a file's time


def test_a_job_that_is_halted_for_another_one_keeps_its_state_and_continues_afterwards(client):
    (client.folder / "trueline.toml").write_text("[engine.local]\ncapacity = 2\n")
    loser = client.submit("local", "--workers", "2:2")
    client.wait("step.applied", step=12)
    client.submit("local", "--workers", "2:2", "--priority", "5", epochs=1)
    until(lambda: "waits for 2 free slots" in client.read()["why"], lambda: client.read())
    client.run("halt", loser)
    assert client.wait_end().outcome == "finished"
    assert client.count() == (8, 0, 0)

    client.job = loser
    kept = client.count()
    assert kept[0] >= 12
    assert kept[1:] == (0, 0)
    assert client.read()["step"] == kept[0]
    client.run("resume", loser)
    client.wait("step.applied", step=kept[0] + 1)
    client.run("halt", loser)
    assert client.count()[1:] == (0, 0)
    assert client.count()[0] > kept[0]


def test_a_client_that_is_killed_has_submitted_the_job(client):
    job = client.submit("local", "--workers", "1")
    client.wait_workers(1)
    (head,) = client.processes("head")
    assert os.getsid(head.pid) != os.getsid(0)
    head.send_signal(signal.SIGTERM)
    assert client.wait_end().outcome == "stopped"
    assert client.count()[1:] == (0, 0)
    assert job in client.run("jobs")


def test_a_node_of_ray_that_dies_is_replaced_before_ray_knows(ray_client, ray):
    client = ray_client
    job = client.submit("ray", "--workers", "1:3")
    client.wait_workers(3)
    there = ray.list_processes("n2")
    (role,) = [role for role in ("host-1", "host-2") if client.processes(role)[0] in there]
    at = time.time()
    ray.kill_node("n2")
    client.wait("host.lost", after=at, host=role)
    client.wait("step.applied", after=at)
    client.wait("host.submitted", after=at)
    ray.start_node("n2")
    client.wait_workers(3, after=client.wait("host.joined", after=at))
    client.run("halt", job)
    assert client.count()[1:] == (0, 0)


def test_why_a_job_waits_for_ray_is_shown_and_halt_withdraws_it(ray_client):
    client = ray_client
    with (client.folder / "trueline.toml").open("a") as file:
        file.write("[engine.ray.huge]\nslots = 64\n")
    job = client.submit("ray:huge", "--workers", "1:2")
    shown = client.run("jobs")
    assert re.search(rf"{job} +ray:huge +queued .*no node of the Ray cluster has 64 CPUs", shown)
    assert "halted while it waited" in client.run("halt", job)
    assert client.read()["state"] == "stopped"
