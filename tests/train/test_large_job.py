"""A job of sixty million parameters loses a worker, as small ones do: no replacement and no record is lost."""

import pytest

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.train.api import train
from trueline.train.settings import Fault
from worlds import TESTS

SIXTY = TESTS / "train" / "recipes" / "sixty.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.jobs
def test_a_replacement_receives_half_a_gigabyte_and_every_record_counts_once(tmp_path):
    seen = []
    with events.listening(lambda name, fields: seen.append((name, dict(fields)))):
        result = train(SIXTY, workers="2:2", job_dir=tmp_path / "job", faults=[Fault(step=3, slot=1, phase="backward")])
    killed = [fields["why"] for name, fields in seen if name in ("worker.killed", "worker.quarantined")]
    assert killed == [], "no replacement is taken for dead while it receives the state"
    moved = [fields for name, fields in seen if name == "worker.receiving"]
    assert all(fields["worker"] == "worker-1.1" and fields["of"] > 450e6 for fields in moved)
    assert "worker-1.1" in [fields["worker"] for name, fields in seen if name == "worker.joined"]
    assert checkpoint.read(result.checkpoint).state["model"]["seen"].unique().tolist() == [1.0]
    assert result.summary.exactly_once
