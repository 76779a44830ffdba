# A model that somebody else exported: ONNX in, answers out, equal to the file's own.
python - <<'MAKE'
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
batch = torch.export.Dim("batch")
exported = torch.export.export(model, (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))
torch.onnx.export(exported, dynamo=True, verbose=False).save("iris.onnx")
MAKE
trueline capture iris.onnx --out iris.bundle
python - <<'CHECK'
import json, urllib.request
import numpy, onnxruntime
from trueline.serve import start
x = [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]
session = onnxruntime.InferenceSession("iris.onnx")
expected = session.run(None, {session.get_inputs()[0].name: numpy.array(x, numpy.float32)})[0]
with start("iris.bundle") as server:
    answer = json.load(urllib.request.urlopen(f"{server.url}/predictions/iris", json.dumps(x).encode()))
assert numpy.allclose(answer, expected, atol=1e-5), (answer, expected)
CHECK
