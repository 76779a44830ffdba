# A recipe in the cells of a notebook: trained by two processes from the kernel, captured, asked.
python - <<'CHECK'
import nbclient, nbformat
cells = """
import torch, trueline
from torch.utils.data import TensorDataset

def model(): return torch.nn.Linear(2, 2)
def loss(outputs, labels): return torch.nn.functional.cross_entropy(outputs, labels)
def optimizer(params): return torch.optim.SGD(params, lr=0.5)
def dataset(mode):
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points[:, 0] > points[:, 1]).long())
---
result = trueline.train("__main__", workers=2, epochs=4, global_batch=64)
---
trueline.capture("__main__", result.checkpoint, "points.bundle")
---
from trueline.runtime.open import open_program
import numpy
session = open_program(trueline.inspect("points.bundle"))
name = session.signature.inputs[0].name
(answer,) = session.run({name: numpy.array([[3, -3], [-3, 3]], numpy.float32)}).values()
print("answers", answer.argmax(1).tolist())
""".split("---")
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
nbclient.NotebookClient(book, timeout=500).execute()
printed = [output.get("text", "") for output in book.cells[-1].outputs]
assert "answers [1, 0]" in "".join(printed), printed
CHECK
