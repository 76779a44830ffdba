"""Storms over whole jobs, and that a storm would find what it looks for. `make chaos` is the long form."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grpc
import pytest
import torch

from trueline.chaos import runner, schedule, verdict
from trueline.chaos import storm as chaos
from trueline.chaos.leftovers import MARK, Remains, find_marked
from trueline.chaos.schedule import KINDS, plan
from trueline.cli.jobs import chaos as verb
from trueline.train import faults
from trueline.train.master.journal import Journal
from trueline.train.master.master import Master
from trueline.train.master.server import SecretInterceptor
from trueline.train.settings import Fault, JobSettings
from worlds import TESTS
from worlds.jobs import JobGate
from worlds.waiting import until

RECIPES = TESTS / "train" / "recipes"
BLIND = tuple(kind for kind in KINDS if kind not in schedule.ROOTS)


def plan_of(recipe: str, **given) -> runner.StormPlan:
    found = {"workers": "2:3", "kinds": BLIND, "settings": {}, **given}
    return runner.StormPlan(recipe=str(RECIPES / recipe), **found)


def rage(tmp_path: Path, asked: runner.StormPlan, *, kills: int, seed: int) -> dict:
    """Storms until so many strikes are done, each told when it is over; the figures of all."""
    found = []
    for exact, storm in chaos.storms(asked, kills=kills, seed=seed, home=tmp_path, tell=verb.report):
        found.append(storm)
        verb.report_storm(exact, storm, sum(one.kills.total() for one in found), kills)
    facts = verb.summarize(found)
    print(verb.format_summary(found, facts))
    return facts


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.long
def test_strikes_at_a_worker_the_master_its_zygote_the_agent_and_all_change_no_answer(tmp_path):
    """Nor lose or repeat a record. The seed has these kinds in one short storm."""
    settings = {"epochs": 22, "checkpoint_every": 20, "evaluate_every": 40}
    facts = rage(tmp_path, plan_of("tiny.py", every=20, settings=settings), kills=5, seed=2365)
    assert facts["violations"] == []
    assert facts["lost"] == facts["repeated"] == 0
    assert facts["difference"] < 1e-9
    assert facts["kills"] >= 5


LONG = {
    "anything": (plan_of("tiny.py", settings={"epochs": 1500, "checkpoint_every": 25, "evaluate_every": 60}), 700),
    "a state that is streamed": (
        plan_of("large.py", settings={"epochs": 450, "checkpoint_every": 40, "evaluate_every": 60}), 150,
    ),
    "bit for bit": (
        plan_of("counting.py", tolerance=0.0, settings={"epochs": 120, "checkpoint_every": 30, "bitwise": True}), 150,
    ),
}  # fmt: skip


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LONG)
def test_a_thousand_strikes_change_no_answer(tmp_path, name):
    """TRUELINE_CHAOS_SEED chooses other strikes, TRUELINE_CHAOS_KILLS another number of them."""
    asked, kills = LONG[name]
    seed = int(os.environ.get("TRUELINE_CHAOS_SEED", "1"))
    facts = rage(tmp_path, asked, kills=int(os.environ.get("TRUELINE_CHAOS_KILLS", kills)), seed=seed)
    assert facts["violations"] == []


def test_a_storm_follows_from_its_seed_alone_and_strikes_with_everything_that_is_asked_for():
    asked = {"steps": 40_000, "slots": 3, "every": 30, "kinds": tuple(KINDS)}
    assert plan(5, **asked) == plan(5, **asked) != plan(6, **asked)
    struck = Counter(strike.kind for strike in plan(5, **asked))
    assert set(struck) == set(KINDS)
    assert {strike.fault.phase for strike in plan(5, **asked) if strike.fault} == set(schedule.POINTS)


def test_strikes_come_by_steps_also_when_no_checkpoint_is_written(tmp_path):
    """A whole storm over a large model went by without a strike: its checkpoints were starved."""
    strikes = [schedule.Strike(step=step, kind="worker") for step in (8, 12)]
    victim = runner.Victim(plan_of("tiny.py", every=4), tmp_path / "home", strikes)
    due = []
    for step in range(16):
        victim._handle("step.applied", {"step": step})
        if victim._is_due():
            due.append((victim.step, victim.plan.pop(0).step))
        if step == 13:
            victim._handle("checkpoint.saved", {})
    assert due == [(12, 8), (15, 12)]


STORM = """
import sys
from pathlib import Path
from trueline.chaos import runner
plan = runner.StormPlan(recipe=sys.argv[1], workers="1", kinds=("worker",), settings={"epochs": 4000})
victim = runner.Victim(plan, Path(sys.argv[2]), [])
print(victim.mark, flush=True)
victim.run()
"""


@pytest.mark.jobs
def test_a_storm_that_is_killed_leaves_no_process_of_its_job(tmp_path, monkeypatch):
    JobGate(tmp_path, monkeypatch)
    command = [sys.executable, "-c", STORM, str(RECIPES / "tiny.py"), str(tmp_path / "home")]
    storm = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    mark = storm.stdout.readline().strip()
    until(lambda: len(find_marked(mark)) >= 4, "launcher, agent, worker and master run")
    storm.kill()
    storm.communicate()
    until(lambda: not find_marked(mark), lambda: [*map(str, find_marked(mark))])


def test_the_clocks_of_a_storm_are_those_of_its_steps_where_these_are_long(tmp_path):
    calm, quick, slow = (
        runner.Victim(plan_of("tiny.py", step_s=step_s), tmp_path / str(step_s), []) for step_s in (0, 0.1, 10)
    )
    assert (calm.lease_s, quick.lease_s, slow.lease_s) == (runner.CALM_LEASE_S, runner.LEASE_S, 30)
    assert (calm.still_s, quick.still_s, slow.still_s) == (200, 200, 600)


def test_a_launcher_meets_fewer_deaths_of_master_and_agent_than_it_gives_up_at():
    kinds = ("worker", "master", "agent", "launcher")
    count = most = 0
    for strike in plan(1, steps=50_000, slots=3, every=20, kinds=kinds):
        count = 0 if strike.kind == "launcher" else count + (strike.kind in ("master", "agent"))
        most = max(most, count)
    assert 1 < most <= schedule.RESTARTS


def test_a_fault_of_any_incarnation_is_carried_out_once_in_the_jobs_life(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUELINE_JOB", str(tmp_path))
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    due = (Fault(step=3, slot=1, incarnation=-1, phase="saving"),)
    for ref, step in (("worker-0.0", 9), ("worker-1.0", 2), ("worker-1.4", 3), ("worker-1.5", 4)):
        faults.Faults(due, ref).at("saving", step)
    assert sent == [signal.SIGKILL]


def test_a_log_that_applies_a_step_twice_is_found_and_one_that_took_it_back_is_not():
    commits = [("COMMIT", {"step": step, "loss": 1.0}) for step in (0, 1)]
    assert verdict.surviving([*commits, commits[1]])[1]
    losses, wrong, back = verdict.surviving(
        [*commits, ("TRUNCATE", {"steps": 1}), ("COMMIT", {"step": 1, "loss": 0.5})]
    )
    assert (losses, wrong, back) == ({0: 1.0, 1: 0.5}, [], 1)


def test_records_that_the_model_counted_too_rarely_or_too_often_are_found():
    weights = {"part.seen": torch.tensor([2.0, 1.0, 2.0, 4.0]), "weight": torch.zeros(4)}
    assert verdict.count_applications(weights, 4, 2) == (1, 2)
    assert verdict.count_applications({"weight": torch.zeros(4)}, 4, 2) == (0, 0)


def test_a_long_gap_is_slow_unless_the_agent_that_starts_the_replacement_was_away():
    second = 10**9
    log = [("COMMIT", {"step": 7, "at_ns": 29 * second, "gap_ms": 9100.0, "generation": 2})]
    assert verdict.gaps(log, [("worker", 20 * second)]) == {"worker": [9000.0]}
    for kind in ("agent", "zombie"):
        assert verdict.gaps(log, [(kind, 15 * second), ("worker", 20 * second)]) == {}
    short = [("COMMIT", {"step": 7, "at_ns": 21 * second, "gap_ms": 1100.0, "generation": 2})]
    assert verdict.gaps(short, [("agent", 15 * second), ("worker", 20 * second)]) == {"worker": [1000.0]}


def test_weights_that_are_not_numbers_are_no_match():
    ours, theirs = {"w": torch.tensor([float("nan")])}, {"w": torch.tensor([1.0])}
    assert not verdict.distance(ours, theirs) <= 1e9


def test_a_process_that_outlives_its_job_is_found_with_its_command():
    before = Remains.of("a-test")
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, MARK: "a-test"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as left:
        assert left.stdout.readline() == b"1\n"
        (said,) = Remains.of("a-test").since(before)
        assert str(left.pid) in said
        assert "sys.stdin.read()" in said
        left.stdin.close()
    assert Remains.of("a-test").since(before) == []


def test_the_command_that_replays_a_storm_names_everything_that_decides_it():
    asked = plan_of("tiny.py", every=40, kinds=("points", "all"), settings={"epochs": 9, "bitwise": True})
    again = verb.replay(asked, 17)
    for part in ("--seed 17", "--every 40", "--what points,all", "--epochs 9", "--bitwise", "--workers 2:3"):
        assert part in again


def test_a_caller_that_is_gone_before_its_answer_does_not_end_the_job():
    crashed = []

    async def gone(request, context):
        raise grpc.aio.InternalError("Failed execute_batch")

    with pytest.raises(grpc.aio.InternalError):
        asyncio.run(SecretInterceptor("secret", crashed.append)._guard(gone)(None, None))
    assert crashed == []


class DyingAgent:
    """An engine whose agent dies while it hears the first order."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def add(self, specs):
        self.asked.append([spec.ref for spec in specs])
        if len(self.asked) == 1:
            raise ConnectionResetError("the agent went away")

    async def list(self):
        return []


def test_a_start_that_a_dying_agent_did_not_hear_is_ordered_again(tmp_path):
    job = JobSettings(name="x", recipe="x.py", recipe_digest="", workers=2, epochs=1, global_batch=4, seed=0)

    async def begin() -> list[list[str]]:
        engine = DyingAgent()
        log = Journal(tmp_path / "log")
        master = Master(job, tmp_path, log, engine, "secret", asyncio.get_running_loop().time)
        await master.adopt()
        await asyncio.gather(*master._tasks)
        log.close()
        return engine.asked

    assert asyncio.run(begin()) == [["worker-0.0", "worker-1.0"]] * 2
