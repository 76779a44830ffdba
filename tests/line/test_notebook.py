"""A recipe that is written in the cells of a real notebook trains, is measured, captured and served from there."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.jobs

CELLS = [
    """import torch, trueline
torch.set_num_threads(2)
torch.randn(400, 400) @ torch.randn(400, 400)  # the kernel has threads of its own: a fork would hang""",
    """EPOCHS = 2
name, epochs, global_batch = "xor", EPOCHS, 16

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)

def points(seed):
    x = torch.randn(96, 2, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())""",
    """def model(): return Net()
loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
def optimizer(params): return torch.optim.SGD(params, lr=0.1)
def dataset(mode): return points(int(mode == "training"))""",
    """result = trueline.train("__main__", workers=2, job_dir="job", faults=[])
result""",
    """trueline.evaluate("__main__", result.chosen)""",
    """captured = trueline.capture("__main__", result.chosen, "xor.bundle", formats=["onnx"])
captured""",
    """from trueline.serve.api import start
import httpx
with start("xor.bundle") as server:
    answer = httpx.post(server.url + "/predictions/xor", json={"x": [[1.0, 1.0]]}, timeout=60).json()
len(answer[0])""",
    """table = torch.ones(3)
def dataset(mode): return table
try:
    trueline.train("__main__")
except trueline.errors.RecipeError as error:
    print(error.message, error.__notes__)""",
]


def test_a_recipe_of_cells_goes_the_whole_line_from_a_kernel_with_threads(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained, evaluated, captured, served, refused = ([*cell.outputs] for cell in book.cells[3:])
    html = "".join(one["data"].get("text/html", "") for one in trained)
    assert "was applied exactly once in each of the 2 epochs" in html
    assert "<svg" in html
    assert "token" not in html
    assert "<script" not in html
    assert "<th>loss</th>" in evaluated[-1]["data"]["text/html"]
    assert "onnx: proven" in captured[-1]["data"]["text/html"]
    assert served[-1]["data"]["text/plain"] == "2"
    assert "dataset() uses 'table', a torch.Tensor" in refused[-1]["text"]
    assert (tmp_path / "job" / "recipe.py").read_text().startswith("# Written by Trueline")


ENDLESS = """import torch, trueline
epochs, global_batch = 100_000, 16
def model(): return torch.nn.Linear(2, 2)
loss = torch.nn.CrossEntropyLoss()
def optimizer(params): return torch.optim.SGD(params, lr=0.1)
def dataset(mode): return torch.utils.data.TensorDataset(torch.randn(96, 2), torch.zeros(96, dtype=torch.long))
trueline.train("__main__", workers=2, job_dir="job")"""


def test_the_stop_button_of_a_notebook_ends_the_job_after_a_checkpoint_and_leaves_no_process(tmp_path: Path) -> None:
    manager_of = pytest.importorskip("jupyter_client.manager").KernelManager
    pytest.importorskip("ipykernel")
    manager = manager_of()
    manager.start_kernel(cwd=str(tmp_path))
    try:
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=120)
        asked = client.execute(ENDLESS)
        shown = ""
        while "step " not in shown:
            shown = str(client.get_iopub_msg(timeout=240)["content"].get("data", ""))
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=120)
        while reply["parent_header"]["msg_id"] != asked:  # of an earlier request
            reply = client.get_shell_msg(timeout=120)
        assert (reply["content"]["status"], reply["content"]["ename"]) == ("error", "KeyboardInterrupt")
        again = client.execute("1 + 1", reply=True, timeout=60)
        assert again["content"]["status"] == "ok", "the kernel lives"
    finally:
        left = psutil.Process(manager.provisioner.pid).children(recursive=True)
        manager.shutdown_kernel(now=True)
    assert [one.cmdline() for one in left if str(tmp_path) in " ".join(one.cmdline())] == []
    assert list((tmp_path / "job" / "checkpoints").glob("step-*")), "the stop has a checkpoint"
    assert not (tmp_path / "job" / "secret").exists()
