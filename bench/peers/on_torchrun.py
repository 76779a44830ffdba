"""The counting model under torchrun: on_torchrun.py FOLDER STEPS

A checkpoint every ten steps, and on from it after a restart. The position in the data follows from the step of the
checkpoint, as a careful user would write it.
"""

import os
import sys
from pathlib import Path

import counting
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    checkpoint = folder / "checkpoint.pt"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    witness, data = counting.Witness(folder, rank), counting.Generated()
    model = counting.model()
    ddp = DistributedDataParallel(model)
    optimizer = counting.optimizer(model.parameters())
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    share, epoch_steps = counting.global_batch // size, len(data) // counting.global_batch
    for step in range(done, steps):
        epoch, place = divmod(step, epoch_steps)
        if step == done or not place:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        start = place * counting.global_batch + rank * share
        inputs, labels = default_collate([data[index] for index in order[start : start + share]])
        optimizer.zero_grad()
        counting.loss(ddp(*inputs), labels).backward()
        optimizer.step()
        witness.applied(step)
        if rank == 0 and step % 10 == 9:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
    witness.testify(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
