"""`Elastic` without a master: a notebook or a plain script."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

import trueline
from trueline import events
from trueline.errors import UsageError
from trueline.parallel.exchange import Overtaken
from trueline.train.step.model_traits import read_traits
from trueline.wire import train_pb2 as pb
from worlds.jobs import TINY
from worlds.waiting import until

pytestmark = pytest.mark.slow

LOOP = """
import sys, torch, trueline
recipe = trueline.load_recipe(sys.argv[1])
torch.manual_seed(0)
model = recipe.model()
optimizer = recipe.optimizer(model.parameters())
job = trueline.Elastic(model, optimizer, recipe.dataset("training"), global_batch=30, epochs=2)
for batch in job:
    applied = job.step(recipe.loss(model(*batch.inputs), batch.labels))
    assert batch.trial or (applied and len(batch.records) == 30)
print(job.steps, job.certificates[1]["records"], sorted(set(model.seen.tolist())))
"""


def script(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, str(TINY)], capture_output=True, text=True, check=False)


def test_the_users_own_loop_runs_alone():
    done = script(LOOP)
    assert done.stdout.strip() == "16 240 [2.0]", done.stderr


class Counted:
    """The records of the recipe; says which were read, and fails once at the 75th when it is asked to."""

    def __init__(self, records, *, fails):
        self.records, self.fails, self.read = records, fails, []

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        self.read.append(index)
        if self.fails and len(self.read) == 75:
            raise OSError("the store is away for a moment")
        return self.records[index]


def own_loop(*, fails=False):
    """What a loop of one's own in this process has: the recipe, the model, what is read, the job of two epochs."""
    recipe = trueline.load_recipe(TINY)
    model = recipe.model()
    read = Counted(recipe.dataset("training"), fails=fails)
    optimizer = recipe.optimizer(model.parameters())
    traits = read_traits(model)
    return recipe, model, read, trueline.Elastic(model, optimizer, read, global_batch=30, epochs=2, traits=traits)


def test_a_loop_that_steps_too_little_or_too_much_is_told_so():
    _, _, _, job = own_loop()
    with pytest.raises(UsageError, match=r"job\.step\(loss\) was called without a batch"):
        job.step(torch.zeros(()))
    with pytest.raises(UsageError, match=r"the loop did not call job\.step"):
        for _ in job:
            pass


def trained(*, fails):
    """The job when it is over, what was read, and the events."""
    recipe, model, read, job = own_loop(fails=fails)
    told = []
    with events.listening(lambda name, fields: told.append(name)):
        for number, batch in enumerate(job, 1):
            assert job.step(recipe.loss(model(*batch.inputs), batch.labels))
            ahead = fails or len(read.read) == 30 * (number + 1)
            assert ahead or read.read[-30:] == batch.records.tolist()
    return job, read.read, told


def test_the_next_batch_is_read_while_the_sums_of_a_step_are_on_their_way():
    job, read, told = trained(fails=False)
    assert (job.steps, len(read), told.count("read.ahead_failed")) == (16, 480, 0)
    assert job.certificates[1]["records"] == 240


def test_a_batch_that_cannot_be_read_ahead_is_read_when_its_step_has_come():
    job, _, told = trained(fails=True)
    assert (job.steps, told.count("read.ahead_failed")) == (16, 1)
    assert job.certificates[1]["records"] == 240


def test_a_worker_that_is_alone_enters_a_planned_view_before_its_next_step():
    """With others it agrees on that in the sums of a step; a newcomer would wait for one more step of its own."""
    recipe, model, _, job = own_loop()
    generations = []
    for batch in job:
        generations.append(job._group.generation)
        job.step(recipe.loss(model(*batch.inputs), batch.labels))
        if batch.step == 3:
            job._link.view = pb.View(generation=generations[0] + 1, members=[job._link.ref])
    assert generations == [generations[0]] * 4 + [generations[0] + 1] * 12


@pytest.mark.parametrize("noticed", ["forward", "step"])
def test_a_step_that_a_newer_view_has_made_futile_is_given_up_at_once_and_its_records_come_again(monkeypatch, noticed):
    monkeypatch.setattr("trueline.train.regroup.state_transfer.STREAM_BYTES", 0)
    recipe, model, _, job = own_loop()
    backward, batches, outcomes = [], [], []
    model.seen.register_hook(lambda _: backward.append(job.steps))
    for number, batch in enumerate(job):
        batches.append(batch.records.tolist())
        if number == 3:
            after = job._group.generation + 1
            job._link.view = pb.View(generation=after, members=[job._link.ref], cut_below=after)
        try:
            with job.forward() if noticed == "forward" else contextlib.nullcontext():
                loss = recipe.loss(model(*batch.inputs), batch.labels)
        except Overtaken as error:
            outcomes.append(noticed)
            job.blame(error)
            continue
        outcomes.append(job.step(loss))
    assert outcomes == [True] * 3 + ["forward" if noticed == "forward" else False] + [True] * 13
    assert batches[3] == batches[4]
    assert backward == list(range(16)), "no backward of the step that was given up"
    assert job.certificates[1]["tally_max"] == job.certificates[1]["tally_min"] == 1


@pytest.mark.jobs
def test_a_loop_that_has_ended_leaves_no_socket_pipe_or_thread_in_a_process_that_trains_again():
    """A notebook trains many times; each time left gloo's listener, its epoll set, a pipe and three threads."""

    def held() -> int:
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    def train() -> None:
        model = torch.nn.Linear(2, 1)
        data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
        job = trueline.Elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), data, global_batch=4)
        for batch in job:
            job.step((model(batch.inputs) - batch.labels).square().mean())

    train()
    before = held()
    for _ in range(5):
        train()
    until(lambda: held() <= before + 5, lambda: f"{held() - before} more descriptors and threads after five loops")
