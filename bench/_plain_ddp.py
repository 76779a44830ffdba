"""The baseline: the recipe's model and batch in a plain DDP loop, by torchrun: _plain_ddp.py LOG STEPS [READING]

READING says who collates the next batch: `inside` the step; DDP's `hook`, once the last bucket is on its way, as the
elastic worker does; a `thread`, one batch ahead, while the step runs; or `loader`, a torch DataLoader with one worker
process and two batches prefetched. BENCH_RECIPE names the recipe.
Writes the monotonic nanoseconds of every applied step of rank 0 to LOG, and each rank's peak memory in bytes to
LOG.RANK. DDP keeps its gradients in buckets, as the elastic worker does, so only the loops are compared.
"""

import collections
import importlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

from _machine import peak_bytes

recipe = importlib.import_module(os.environ.get("BENCH_RECIPE", "recipe"))


def shares(steps: int, rank: int, size: int) -> Iterator[list[int]]:
    """The records of this rank in each step; each epoch has an order of its own."""
    share = recipe.global_batch // size
    for step in range(steps):
        if step % recipe.STEPS == 0:
            order = torch.randperm(recipe.RECORDS, generator=torch.Generator().manual_seed(step)).tolist()
        start = (step % recipe.STEPS) * recipe.global_batch + rank * share
        yield order[start : start + share]


def batches(reading: str, model: DistributedDataParallel, dataset: Any, records: Iterator[list[int]]) -> Iterator[Any]:
    def collate(indices: list[int]) -> Any:
        return default_collate([dataset[index] for index in indices])

    if reading == "inside":
        yield from map(collate, records)
    elif reading == "loader":
        yield from DataLoader(dataset, batch_sampler=list(records), num_workers=1, prefetch_factor=2)
    elif reading == "thread":
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(collate, next(records))
            for indices in records:
                batch, coming = coming.result(), reader.submit(collate, indices)
                yield batch
            yield coming.result()
    else:
        ahead = collections.deque([collate(next(records))])

        def sum_and_read(size: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)
            if bucket.is_last():
                ahead.extend(collate(indices) for indices in itertools.islice(records, 1))
            return work.get_future().then(lambda done: done.value()[0])

        model.register_comm_hook(dist.get_world_size(), sum_and_read)
        while ahead:
            yield ahead.popleft()


def main() -> None:
    log, steps, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(recipe.model(), gradient_as_bucket_view=True)
    optimizer = recipe.optimizer(model.parameters())
    at_ns = []
    reading = rest[0] if rest else "inside"
    for inputs, labels in batches(reading, model, recipe.Generated(), shares(int(steps), rank, size)):
        optimizer.zero_grad(set_to_none=True)
        outputs = model(*inputs) if isinstance(inputs, list) else model(inputs)
        recipe.loss(outputs, labels).backward()
        optimizer.step()
        at_ns.append(time.monotonic_ns())
    if rank == 0:
        Path(log).write_text("".join(f"{at}\n" for at in at_ns))
    Path(f"{log}.{rank}").write_text(str(peak_bytes(os.getpid())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
