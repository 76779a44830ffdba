"""The baseline: the recipe's model and batch in a plain DDP loop, started by torchrun: _plain_ddp.py LOG STEPS

Writes the monotonic nanoseconds of every applied step of rank 0 to LOG. DDP keeps its gradients in buckets, as the
elastic worker does, so only the loops are compared.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

import recipe


def main() -> None:
    log, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(recipe.model(), gradient_as_bucket_view=True)
    optimizer = recipe.optimizer(model.parameters())
    dataset = recipe.Generated()
    share = recipe.global_batch // size
    at_ns = []
    for step in range(steps):
        if step % recipe.STEPS == 0:
            order = torch.randperm(recipe.RECORDS, generator=torch.Generator().manual_seed(step)).tolist()
        start = (step % recipe.STEPS) * recipe.global_batch + rank * share
        inputs, labels = default_collate([dataset[index] for index in order[start : start + share]])
        optimizer.zero_grad(set_to_none=True)
        recipe.loss(model(inputs), labels).backward()
        optimizer.step()
        at_ns.append(time.monotonic_ns())
    if rank == 0:
        with open(log, "w") as out:
            out.writelines(f"{at}\n" for at in at_ns)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
