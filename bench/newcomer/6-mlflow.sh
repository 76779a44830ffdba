# A bundle in MLflow: registered under an alias, loaded by mlflow's own API, equal to the bundle.
export MLFLOW_TRACKING_URI="sqlite:///$PWD/mlflow.db"
python - <<'MAKE'
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
batch = torch.export.Dim("batch")
torch.export.save(torch.export.export(model, (torch.zeros(2, 4),), dynamic_shapes=({0: batch},)), "iris.pt2")
MAKE
trueline capture iris.pt2 --out iris.bundle
trueline register iris.bundle --tracking-uri "$MLFLOW_TRACKING_URI"
python - <<'CHECK'
import mlflow, numpy, torch
x = numpy.array([[5.1, 3.5, 1.4, 0.2]], numpy.float32)
answer = mlflow.pyfunc.load_model("models:/iris@champion").predict(x)
expected = torch.export.load("iris.pt2").module()(torch.tensor(x)).detach().numpy()
assert numpy.allclose(answer, expected, atol=1e-5), (answer, expected)
CHECK
