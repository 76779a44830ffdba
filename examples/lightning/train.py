"""A LightningModule in an elastic loop: its training_step and configure_optimizers, without Lightning's Trainer.

    trueline run examples/lightning/train.py --workers 2

Why a loop and not lightning.Trainer: docs/guides/own-loop.md.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning
import trueline


class Spirals(lightning.LightningModule):
    """Which of two spirals a point is on."""

    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.classify(points)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        points, labels = batch
        return nn.functional.cross_entropy(self(points), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def spirals(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (size,), generator=generator)
    angle = torch.rand(size, generator=generator) * 6 + 0.5
    turned = angle + labels * torch.pi
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 6
    return TensorDataset(points, labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    dataset = spirals(2048)
    torch.manual_seed(0)  # every worker begins with the same weights
    module = Spirals().train()
    job = trueline.Elastic(module, module.configure_optimizers(), dataset, global_batch=64, epochs=options.epochs)
    for batch in job:
        job.step(module.training_step((batch.inputs, batch.labels), job.steps))

    points, labels = dataset.tensors
    with torch.no_grad():
        accuracy = (module.eval()(points).argmax(dim=1) == labels).float().mean()
    print(f"{job.steps} steps, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
