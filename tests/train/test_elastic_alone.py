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
