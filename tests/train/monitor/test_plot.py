"""A notebook shows a job's loss and its progress as text and static SVG."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from trueline.train.monitor.notebook import ProgressLine, is_kernel
from trueline.train.monitor.plot import draw, plot_job


def test_the_loss_of_a_job_is_a_picture_without_a_script_that_marks_changes_of_the_workers(tmp_path: Path) -> None:
    events = [
        ("view.published", {"generation": 1, "why": "all are ready"}),
        *(("step.applied", {"step": step, "loss": 4.0 - step, "records": 8}) for step in range(3)),
        ("view.published", {"generation": 2, "why": "worker-1.0 <died>"}),
        ("step.applied", {"step": 2, "loss": float("nan"), "records": 8}),
        ("step.applied", {"step": 3, "loss": 1.0, "records": 8}),
    ]
    lines = [json.dumps({"at": 1.0, "name": name, "fields": fields}) for name, fields in events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    plot = plot_job(tmp_path)
    root = ElementTree.fromstring(plot.svg)
    names = [one.tag.rpartition("}")[2] for one in root.iter()]
    assert names.count("line") == 1
    assert "script" not in names
    assert "generation 2: worker-1.0 <died>" in "".join(root.itertext())
    (curve,) = [one for one in root.iter() if one.tag.endswith("polyline")]
    assert len(curve.attrib["points"].split()) == 3  # the step that is not finite is left out
    plot.save(tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text() == plot._repr_html_()


def test_a_job_without_a_step_has_a_picture_too() -> None:
    ElementTree.fromstring(draw([], [], "none & nothing"))


def test_progress_is_one_line_whose_link_goes_when_the_job_ends() -> None:
    shown: list[tuple[str, str]] = []
    line = ProgressLine(lambda text, html: shown.append((text, html)))
    line("page.opened", {"url": "http://127.0.0.1:1/?token=x&a"})
    line("step.applied", {"step": 0, "total": 8, "loss": 0.5})
    line("step.applied", {"step": 1, "total": 8, "loss": 0.25})
    assert len(shown) == 1  # the others are too soon
    line("worker.killed", {"worker": "worker-1.0", "why": "a test"})
    assert shown[-1][0] == "step 2/8, loss 0.25; killed worker-1.0"
    assert '<progress value="2" max="8">' in shown[-1][1]
    assert 'href="http://127.0.0.1:1/?token=x&amp;a"' in shown[-1][1]
    line.show(ended=True)
    assert "token" not in shown[-1][1]
    assert not is_kernel()
