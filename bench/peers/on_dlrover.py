"""The counting model under DLRover, with its sampler and its flash checkpoint: on_dlrover.py FOLDER STEPS

Every ten steps model, optimizer and sampler go to shared memory, every hundred to the disk, as its examples do.
"""

import sys
from pathlib import Path

import counting
import torch
import torch.distributed as dist
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, data = counting.model(), counting.Generated()
    ddp = DistributedDataParallel(model)
    optimizer = counting.optimizer(model.parameters())
    sampler = ElasticDistributedSampler(data, shuffle=True)
    checkpointer = DdpCheckpointer(str(folder / "checkpoints"))
    saved, done = checkpointer.load_checkpoint(), 0
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])
        done = saved["step"]
    train(ddp, optimizer, sampler, checkpointer, counting.Witness(folder, dist.get_rank()), done, steps)
    dist.destroy_process_group()


def train(ddp, optimizer, sampler, checkpointer, witness, done, steps) -> None:
    share, epoch_steps = counting.global_batch // dist.get_world_size(), len(sampler.dataset) // counting.global_batch
    while done < steps:
        sampler.set_epoch(done // epoch_steps)
        for inputs, labels in DataLoader(sampler.dataset, batch_size=share, sampler=sampler):
            optimizer.zero_grad()
            counting.loss(ddp(*inputs), labels).backward()
            optimizer.step()
            witness.applied(done)
            done += 1
            if done % 10 == 0:
                kind = StorageType.DISK if done % 100 == 0 else StorageType.MEMORY
                state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(),
                         "sampler": sampler.state_dict(done % epoch_steps, share), "step": done}  # fmt: skip
                checkpointer.save_checkpoint(done, state, storage_type=kind)
            if done >= steps:
                break
    witness.testify(ddp.module)


if __name__ == "__main__":
    main()
