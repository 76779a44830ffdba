"""A newcomer that receives a large state beside the training takes the steps meanwhile with the parameters that they
leave out, as the others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.train import api
from trueline.train.settings import Fault

pytestmark = pytest.mark.jobs

LOOP = """
import sys, torch, trueline

torch.manual_seed(0)
inputs = torch.randn(240, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
wide = torch.nn.Sequential(torch.nn.Linear(6, 2000), torch.nn.Linear(2000, 500))
model = torch.nn.ModuleDict({"wide": wide, "usual": torch.nn.Linear(6, 1), "other": torch.nn.Linear(6, 1)}).double()
advance = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
job = trueline.Elastic(model, advance, data, global_batch=30, epochs=12)
for batch in job:
    outputs = model["usual"](batch.inputs) + model["wide"](batch.inputs).mean(dim=1, keepdim=True)
    if batch.step % 3 or (batch.trial and sys.argv[1] == "unseen"):
        outputs = outputs + model["other"](batch.inputs)
    job.step((outputs - batch.labels).square().mean())
"""


@pytest.mark.parametrize("how", ["seen", "unseen"])
def test_a_large_model_whose_steps_leave_parameters_out_is_that_of_one_process_though_workers_die(how, tmp_path):
    """`how`: whether the trial before the first step meets such a step."""

    def run(workers: int, faults: list[Fault] = []) -> tuple[dict[str, torch.Tensor], list[str]]:  # noqa: B006
        folder, heard = tmp_path / str(workers), list[str]()
        folder.mkdir()
        (folder / "loop.py").write_text(LOOP)
        job = api.prepare_script(folder / "loop.py", [how], job_dir=folder / "job", workers=workers, faults=faults)
        with events.listening(lambda name, _: heard.append(name)):
            result = api.launch(job)
        assert result.summary.exactly_once
        logs = "".join(path.read_text() for path in Path(folder / "job" / "logs").glob("worker-*"))
        return checkpoint.read(result.checkpoint).state["model"], [*heard, logs]

    alone, _ = run(1)
    found, heard = run(3, [Fault(step=4, slot=0), Fault(step=21, slot=1, phase="applied")])
    assert heard.count("worker.lost") == 2
    assert "worker.caught_up" in heard[-1], "the state of a newcomer is streamed"
    for name, value in found.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-9)
