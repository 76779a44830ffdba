"""The counting model under torchft, one replica group a process: on_torchft.py FOLDER STEPS GROUP

The data path is that of torchft's own train_ddp.py: its DistributedSampler over the largest number of groups, a plain
DataLoader, and the job's end at a number of committed steps.
"""

import sys
from datetime import timedelta
from pathlib import Path

import counting
import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    folder, steps, group = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = counting.model()
    optimizer = counting.optimizer(model.parameters())

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load, state_dict=save,
        replica_id=f"counting-{group}", timeout=timedelta(seconds=10), rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, hostname="127.0.0.1",
    )  # fmt: skip
    train(model, optimizer, manager, counting.Witness(folder, group), steps, group)
    manager.shutdown(wait=False)


def train(model, optimizer, manager, witness, steps, group) -> None:
    data, share = counting.Generated(), counting.global_batch // counting.WORKERS
    sampler = DistributedSampler(
        data, replica_rank=group, num_replica_groups=counting.WORKERS, group_rank=0, num_replicas=1, shuffle=True
    )
    ddp, committing = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    while True:
        for inputs, labels in torch.utils.data.DataLoader(data, batch_size=share, sampler=sampler):
            committing.zero_grad()
            counting.loss(ddp(*inputs), labels).backward()
            # The mean is over those who take part; the counter has to grow by one whatever their number.
            optimizer.param_groups[1]["lr"] = float(share * manager.num_participants())
            before = manager.current_step()
            committing.step()
            if manager.current_step() > before:
                witness.applied(before)
            if manager.current_step() >= steps:
                witness.testify(model)
                return


if __name__ == "__main__":
    main()
