"""Handwritten digits with a training loop of your own; the three lines marked ◀ make it elastic.

python examples/own_loop/train.py                        one process, as ever
trueline run examples/own_loop/train.py --workers 3      three, any of which may be killed
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import trueline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.005)
    options = parser.parse_args()

    pixels, digits = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(digits))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    # ◀ instead of a DataLoader: the records of each step, shared by all workers of the job
    job = trueline.Elastic(model, optimizer, dataset, global_batch=64, epochs=options.epochs)
    for batch in job:  # ◀ instead of two loops over epochs and batches
        loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
        job.step(loss)  # ◀ instead of zero_grad, backward, step

    # What follows runs in every process that is there at the end; all of them hold the same weights.
    with torch.no_grad():
        inputs, labels = dataset.tensors
        accuracy = (model(inputs).argmax(dim=1) == labels).float().mean().item()
    print(f"{job.steps} steps, accuracy on the training records {accuracy:.3f}")
    for certificate in job.certificates:
        print(f"epoch {certificate['epoch']}: {certificate['records']} records, each applied once")


if __name__ == "__main__":
    main()
