"""A small GAN over points on a ring: two networks, two losses, two optimizers, one elastic step.

python examples/gan/train.py                        one process
trueline run examples/gan/train.py --workers 3      three, any of which may be killed

The gradients of a sum are the sums of the gradients, so two backward passes are one over the sum of both losses. What
one loss must not change is detached in it: the points in the discriminator's, the discriminator in the generator's.
"""

import argparse

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import trueline


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def losses(gan: Gan, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the discriminator and of the generator, each a mean over the records."""
    judge, points = nn.functional.softplus, gan.generator(torch.randn(len(real), 4))
    of_discriminator = judge(-gan.discriminator(real)).mean() + judge(gan.discriminator(points.detach())).mean()
    fixed = {name: value.detach() for name, value in gan.discriminator.named_parameters()}
    return of_discriminator, judge(-functional_call(gan.discriminator, fixed, points)).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    angles = torch.rand(512, generator=torch.Generator().manual_seed(0)) * 6.2832
    ring = torch.stack([angles.cos(), angles.sin()], dim=1)
    torch.manual_seed(0)
    gan = Gan().train()
    optimizer = trueline.JointOptimizer(
        torch.optim.Adam(gan.generator.parameters(), lr=2e-3, betas=(0.5, 0.9)),
        torch.optim.Adam(gan.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
    )
    job = trueline.Elastic(gan, optimizer, TensorDataset(ring, angles), global_batch=64, epochs=options.epochs)
    for batch in job:
        of_discriminator, of_generator = losses(gan, batch.inputs)
        if job.step(of_discriminator + of_generator):
            job.log(discriminator=of_discriminator.item(), generator=of_generator.item())

    radius = gan.generator(torch.randn(256, 4)).norm(dim=1).mean().item()
    if job.leads:
        print(f"{job.steps} steps, mean radius {radius:.2f}")


if __name__ == "__main__":
    main()
