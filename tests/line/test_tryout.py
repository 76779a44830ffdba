"""`trueline try` as a user runs it: a killed worker, a proof, an answer, a folder to go on with."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trueline.bundle.read import open_bundle
from trueline.columns import answers
from trueline.runtime.open import open_program

pytestmark = [pytest.mark.jobs, pytest.mark.slow]


def test_a_first_try_survives_a_kill_proves_its_answers_and_leaves_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trueline", "try", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)
    killed = tried["summary"]["regroups"]
    assert any("SIGKILL" in one["reason"] for one in killed), killed
    assert all(one["records"] == 240 for one in tried["summary"]["certificates"])
    assert tried["served"]["records"] == 60
    assert tried["served"]["decisions_changed"] == 0
    bundle = open_bundle(tmp_path / tried["bundle"])
    columns, body = bundle.columns(), json.loads(shlex.split(tried["curl"])[-1])
    assert columns is not None
    assert body == bundle.golden_records()[:1]
    expected = answers.records_of(columns, open_program(bundle).run(columns.encode_rows(body)))
    assert [one["class"] for one in tried["answer"]] == [one["class"] for one in expected]
    assert tried["answer"][0]["probabilities"] == pytest.approx(expected[0]["probabilities"], rel=1e-3, abs=1e-4)
    assert (tmp_path / "flats" / "recipe.py").exists()
    again = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert again.returncode == 2
    assert "exists already and is not overwritten" in again.stderr
