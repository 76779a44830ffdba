"""A job of sixty million parameters loses a worker, as small ones do: no replacement and no record is lost."""

from pathlib import Path

import pytest

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.train.api import train
from trueline.train.settings import Fault
from worlds import TESTS

SIXTY = TESTS / "train" / "recipes" / "sixty.py"
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(pid):
    """Memory of a process in huge pages (proc(5)); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.jobs
def test_a_replacement_receives_half_a_gigabyte_and_every_record_counts_once(tmp_path):
    seen, huge = [], {}

    def listen(name, fields):
        seen.append((name, dict(fields)))
        if name == "worker.running":
            huge[fields["pid"]] = 0
        elif name == "step.applied":
            huge.update((pid, max(huge[pid], huge_bytes(pid))) for pid in huge)

    with events.listening(listen):
        result = train(SIXTY, workers="2:2", job_dir=tmp_path / "job", faults=[Fault(step=3, slot=1, phase="backward")])
    killed = [fields["why"] for name, fields in seen if name in ("worker.killed", "worker.quarantined")]
    assert killed == [], "no replacement is taken for dead while it receives the state"
    moved = [fields for name, fields in seen if name == "worker.receiving"]
    assert all(fields["worker"] == "worker-1.1" and fields["of"] > 450e6 for fields in moved)
    assert "worker-1.1" in [fields["worker"] for name, fields in seen if name == "worker.joined"]
    assert checkpoint.read(result.checkpoint).state["model"]["seen"].unique().tolist() == [1.0]
    assert result.summary.exactly_once
    if not HUGE.exists() or "[never]" in HUGE.read_text():
        pytest.skip(f"this system has no huge pages for processes that ask for them ({HUGE})")
    assert max(huge.values()) > 400e6, "small pages are given back so slowly that a death is noticed late"
