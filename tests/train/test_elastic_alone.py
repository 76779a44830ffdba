"""`Elastic` without a master: a notebook or a plain script."""

import subprocess
import sys

import pytest
from job_worlds import TINY

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
    assert applied and len(batch.records) == 30
print(job.steps, job.certificates[1]["records"], sorted(set(model.seen.tolist())))
"""


def script(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, str(TINY)], capture_output=True, text=True, check=False)


def test_the_users_own_loop_runs_alone():
    done = script(LOOP)
    assert done.stdout.strip() == "16 240 [2.0]", done.stderr


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("    applied = job.step", "    pass\nimport sys; sys.exit()\nif 0:\n    applied = job.step"),
        ("for batch in job:", "job.step(torch.zeros(()))\nfor batch in job:"),
    ],
    ids=["no step", "a step without a batch"],
)
def test_a_loop_that_steps_too_little_or_too_much_is_told_so(wrong, message):
    done = script(LOOP.replace(wrong, message))
    assert "UsageError" in done.stderr


AHEAD = """
import sys, torch, trueline
from trueline import events
recipe = trueline.load_recipe(sys.argv[1])
torch.manual_seed(0)
model = recipe.model()
records, read, told = recipe.dataset("training"), [], []
class Counted:
    def __len__(self):
        return len(records)
    def __getitem__(self, index):
        read.append(index)
        if FAILS and len(read) == 75:
            raise OSError("the store is away for a moment")
        return records[index]
job = trueline.Elastic(model, recipe.optimizer(model.parameters()), Counted(), global_batch=30, epochs=2)
with events.listening(lambda name, fields: told.append(name)):
    for number, batch in enumerate(job, 1):
        assert job.step(recipe.loss(model(*batch.inputs), batch.labels))
        assert FAILS or read[-30:] == batch.records.tolist() or len(read) == 30 * (number + 1)
print(job.steps, len(read), told.count("read.ahead_failed"), job.certificates[1]["records"])
"""


def test_the_next_batch_is_read_while_the_sums_of_a_step_are_on_their_way():
    done = script(AHEAD.replace("FAILS", "False"))
    assert done.stdout.strip() == "16 480 0 240", done.stderr


def test_a_batch_that_cannot_be_read_ahead_is_read_when_its_step_has_come():
    done = script(AHEAD.replace("FAILS", "True"))
    steps, _, failures, records = done.stdout.split()
    assert (steps, failures, records) == ("16", "1", "240"), done.stderr
