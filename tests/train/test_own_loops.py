"""The examples with loops of their own train, each alone in one process; a job of a script is in test_scripts.py."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "needs", "arguments"),
    [
        ("own_loop", "sklearn", ["--epochs", "2"]),
        ("huggingface", "transformers", ["--epochs", "1", "--records", "128"]),
        ("lightning", "lightning", ["--epochs", "1"]),
    ],
)
def test_an_example_with_a_loop_of_its_own_trains_alone(example, needs, arguments):
    if importlib.util.find_spec(needs) is None:
        reason = f"examples/{example} is not tried: {needs} is not installed (pip install {needs})"
        print(reason)
        pytest.skip(reason)
    command = [sys.executable, str(EXAMPLES / example / "train.py"), *arguments]
    said = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert said.returncode == 0, said.stderr
    assert "steps, accuracy" in said.stdout
