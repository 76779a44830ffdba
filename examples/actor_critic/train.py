"""An actor and a critic bring a cart to the middle: two networks, two losses, two optimizers, one elastic step.

python examples/actor_critic/train.py                        one process
trueline run examples/actor_critic/train.py --workers 3      three, any of which may be killed

A record is a start: position and speed of a cart. The loop plays an episode from each start of its batch with actions
that the actor draws. Draws are seeded by (seed, step, shard), so any number of workers plays the same episodes.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trueline

PUSHES = torch.tensor([-0.3, 0.0, 0.3])
LENGTH, DISCOUNT = 12, 0.9


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def move(cart: torch.Tensor, push: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next position and speed [n, 2], and the reward [n]: how near the middle the cart is."""
    speed = 0.9 * cart[:, 1] + push
    position = (cart[:, 0] + 0.3 * speed).clamp(-3, 3)
    return torch.stack([position, speed], dim=1), -position.abs()


def losses(agent: ActorCritic, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the actor and of the critic, each a mean over the records, and the mean reward of a move."""
    cart, of_actor, of_critic, total = starts, torch.zeros(()), torch.zeros(()), torch.zeros(())
    for _ in range(LENGTH):
        choices = torch.distributions.Categorical(logits=agent.actor(cart))
        taken = choices.sample()
        after, reward = move(cart, PUSHES[taken])
        value = agent.critic(cart).squeeze(1)
        with torch.no_grad():
            target = reward + DISCOUNT * agent.critic(after).squeeze(1)
        advantage = target - value
        of_actor = of_actor - (choices.log_prob(taken) * advantage.detach() + 0.01 * choices.entropy()).mean()
        of_critic = of_critic + advantage.square().mean()
        cart, total = after, total + reward.mean()
    return of_actor / LENGTH, of_critic / LENGTH, total / LENGTH


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    starts = torch.rand(512, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    torch.manual_seed(0)
    agent = ActorCritic().train()
    optimizer = trueline.JointOptimizer(
        torch.optim.Adam(agent.actor.parameters(), lr=3e-3), torch.optim.Adam(agent.critic.parameters(), lr=1e-2)
    )
    data = TensorDataset(starts, torch.zeros(len(starts)))
    job = trueline.Elastic(agent, optimizer, data, global_batch=64, epochs=options.epochs)
    for batch in job:
        of_actor, of_critic, reward = losses(agent, batch.inputs)
        if job.step(of_actor + of_critic):
            job.log(actor=of_actor.item(), critic=of_critic.item(), reward=reward.item())
    with torch.no_grad():
        reward = losses(agent, starts)[2].item()
    if job.leads:
        print(f"{job.steps} steps, mean reward of a move {reward:.2f}")


if __name__ == "__main__":
    main()
