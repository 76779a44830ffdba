# A client of another tool: Triton's Python client asks a bundle over the Open Inference Protocol.
python - <<'MAKE'
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(dim=1)).eval()
batch = torch.export.Dim("batch")
torch.export.save(torch.export.export(model, (torch.zeros(2, 4),), dynamic_shapes=({0: batch},)), "iris.pt2")
MAKE
trueline capture iris.pt2 --out iris.bundle
python - <<'CHECK'
import numpy, torch
import tritonclient.http as triton
from trueline.serve import start
x = numpy.array([[5.1, 3.5, 1.4, 0.2]], numpy.float32)
with start("iris.bundle") as server:
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    meta = client.get_model_metadata("iris")
    given = triton.InferInput(meta["inputs"][0]["name"], [1, 4], "FP32")
    given.set_data_from_numpy(x)
    answer = client.infer("iris", [given]).as_numpy(meta["outputs"][0]["name"])
expected = torch.export.load("iris.pt2").module()(torch.tensor(x)).detach().numpy()
assert numpy.allclose(answer, expected, atol=1e-5), (answer, expected)
CHECK
