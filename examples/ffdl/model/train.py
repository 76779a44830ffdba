"""A learner as FfDL's c10d examples are written: a process group in a file of /job, rank 0 in every learner, and
learners that sleep when they are done. `trueline resume` continues from its checkpoint in CHECKPOINT_DIR."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.multiprocessing import Process
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def run(batch_size: int, epochs: int) -> None:
    torch.manual_seed(7)
    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = TensorDataset(inputs[:1500], labels[:1500]), (inputs[1500:], labels[1500:])
    sampler = DistributedSampler(train, dist.get_world_size(), dist.get_rank(), seed=7)
    loader = DataLoader(train, batch_size=batch_size // dist.get_world_size(), sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    kept = Path(os.environ["CHECKPOINT_DIR"]) / "digits.pt"
    first = 0
    if kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
        print(f"continues with epoch {first}")
    parallel = DistributedDataParallel(model)

    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for batch, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel(batch), target)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}, loss {total / len(loader):.4f}")
        if os.environ["LEARNER_ID"] == "1":
            accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
            print(f"accuracy {accuracy:.4f} after epoch {epoch}")
            partial = kept.with_suffix(".partial")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, partial)
            partial.replace(kept)
    if os.environ["LEARNER_ID"] == "1":
        torch.save(model.state_dict(), Path(os.environ["RESULT_DIR"]) / "model.pt")


def join(rank: int, size: int, batch_size: int, epochs: int) -> None:
    dist.init_process_group(
        "gloo", init_method="file:///job/" + os.environ["TRAINING_ID"], world_size=size, rank=rank,
        group_name="train_dist",
    )  # fmt: skip
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}")
    run(batch_size, epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    process = Process(target=join, args=(0, int(os.environ["NUM_LEARNERS"]), args.batch_size, args.epochs))
    process.start()
    process.join()
    if os.environ["LEARNER_ID"] != "1":
        while True:  # FfDL ends a job with its first learner
            time.sleep(1_000_000)
