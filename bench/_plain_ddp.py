"""The yardstick: the same model and batch in a plain DDP loop, to be started by torchrun.

Writes one line `rank pid step monotonic_ns` for each applied step to the file it is given, saves a checkpoint every
ten steps (as torchrun's elastic example does) and goes on from it when torchrun starts it again.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

import recipe


def main() -> None:
    log, checkpoint, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(recipe.model())
    optimizer = recipe.optimizer(model.parameters())
    dataset, done = recipe.Generated(), 0
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    share = recipe.global_batch // size
    with open(log, "a", buffering=1) as out:
        for step in range(done, steps):
            if step % 100 == 0 or step == done:
                order = torch.randperm(recipe.RECORDS, generator=torch.Generator().manual_seed(step // 100)).tolist()
            start = (step % 100) * recipe.global_batch + rank * share
            inputs, labels = default_collate([dataset[index] for index in order[start : start + share]])
            optimizer.zero_grad(set_to_none=True)
            recipe.loss(model(inputs), labels).backward()
            optimizer.step()
            out.write(f"{rank} {os.getpid()} {step} {time.monotonic_ns()}\n")
            if rank == 0 and checkpoint != "none" and step % 10 == 9:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, checkpoint + ".new")
                os.replace(checkpoint + ".new", checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
