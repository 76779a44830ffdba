"""A trainer of the parameter server's benchmark: `_ps_trainer.py KIND SETTINGS` prints what it measured as JSON.

The workload is the same for all kinds: 1,024 records of 26 ids each, of a Zipf distribution over two million ids
(13,900 of the 26,624 are unique), rows of 16 numbers, a linear layer over them, SGD.

    ours       `trueline.Embedding` and the client of `trueline.ps`: the rows of the next minibatch are pulled, and
               gradients pushed, while this one is computed
    serial     the same, one after the other
    rpc, rpc_tcp, and the servers rpc_server, rpc_tcp_server
               torch's RPC tutorial: `nn.Embedding(sparse=True)` on the server, distributed autograd and optimizer,
               with the default transport, and with TCP
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

RECORDS, FIELDS, DIM, VOCABULARY, EXPONENT = 1024, 26, 16, 2_000_000, 0.98
BATCHES = 48
WARM_STEPS = 512
"""Of all trainers before the clock runs: all rows exist, and a server's logs (256 MB each) are written over, as in all
later hours of a job. The steps before write to memory that is new to the system."""
WINDOW_S = 0.25
LR = 0.01


def draw_batches(seed: int, *, hashed: bool) -> list[torch.Tensor]:
    """[RECORDS, FIELDS] int64 each. `hashed`: spread over all of int64, as a table without a vocabulary has them."""
    weights = np.cumsum(np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -EXPONENT)
    random = np.random.default_rng(seed)
    drawn = [np.searchsorted(weights, random.random((RECORDS, FIELDS)) * weights[-1]) for _ in range(BATCHES)]
    if hashed:
        drawn = [(ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64) for ids in drawn]
    return [torch.from_numpy(ids.astype(np.int64)) for ids in drawn]


class Meter:
    """Steps, and the most of them in a window."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.steps, self.windows = 0, [0.0]
        self._cpu, self._began = time.process_time(), time.monotonic()
        self._mark = self._began, 0

    def count(self) -> bool:
        """Counts a step; whether there is time for another."""
        self.steps += 1
        now = time.monotonic()
        if now - self._mark[0] >= WINDOW_S:
            self.windows.append((self.steps - self._mark[1]) / (now - self._mark[0]))
            self._mark = now, self.steps
        return now < self.until

    def tell(self) -> dict[str, float]:
        took = time.monotonic() - self._began
        return {
            "steps": self.steps, "seconds": took, "cpu_s": time.process_time() - self._cpu,
            "samples_per_s": self.steps * RECORDS / took, "best_samples_per_s": max(self.windows) * RECORDS,
        }  # fmt: skip


def wait_for_go() -> None:
    """Says that the trainer is ready, and returns when the benchmark says go."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from trueline.ps.model.embedding import Embedding

        self.table = Embedding(DIM)
        self.linear = nn.Linear(FIELDS * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(ids)
        return self.linear(rows.flatten(1)).squeeze(1)


def train_ours(settings: dict[str, Any], *, overlap: bool) -> dict[str, float]:
    import msgspec

    from trueline.ps import dial
    from trueline.ps.client import PsClient
    from trueline.ps.gradients import Gradients
    from trueline.ps.messages import Routing
    from trueline.ps.model.minibatch import Tables
    from trueline.ps.server.memory import keep_freed

    keep_freed()
    addresses: Callable[[str], Any] = functools.partial(dial.read_address, Path(settings["job"]))
    if settings["tcp"]:
        local = addresses
        addresses = lambda ref: (found := local(ref)) and msgspec.structs.replace(found, unix="")  # noqa: E731
    routing = msgspec.msgpack.decode(bytes.fromhex(settings["routing"]), type=Routing)
    client = PsClient(addresses, routing, settings["secret"].encode(), outstanding=2)
    model = Clicks()
    tables, labels = Tables(model), torch.zeros(RECORDS)
    optimizer = torch.optim.SGD(model.linear.parameters(), LR)
    batches = draw_batches(settings["seed"], hashed=True)
    pull = lambda wanted: client.pull(wanted, dense=False).rows  # noqa: E731
    with tables.minibatch(pull, batches[0]):
        model(batches[0])

    def ahead() -> Iterator[tuple[torch.Tensor, Any, Any]]:
        number = 0
        while True:
            ids = batches[number % BATCHES]
            prediction = tables.predict(ids)
            assert prediction is not None
            yield ids, prediction, client.start_pull(prediction.wanted, dense=False)
            number += 1

    first, meter, coming = int(settings["seed"]) * 10_000_000, Meter(0.0), ahead()

    def train(meter: Meter, first: int, *, overlap: bool) -> None:
        following = next(coming)
        while True:
            ids, prediction, pulled = following
            rows = pulled.result()
            if overlap:
                following = next(coming)
            with tables.minibatch(pull, ids, prediction=prediction, rows=rows.rows) as minibatch:
                loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
                loss.backward()
                found = minibatch.gradients()
            optimizer.step()
            optimizer.zero_grad()
            client.push(Gradients(0, first + meter.steps, 1.0, (LR,), found, {}, rows.steps))
            if not overlap:
                client.drain()
            client.take_acknowledged()
            if not meter.count():
                break
            if not overlap:
                following = next(coming)
        client.drain()

    while meter.steps < max(BATCHES, WARM_STEPS // settings["trainers"]):  # what is pulled ahead is dropped at the end
        train(meter, first, overlap=False)
    wait_for_go()
    first, meter = first + meter.steps, Meter(settings["seconds"])
    train(meter, first, overlap=overlap)
    told = meter.tell()
    client.close()
    return told


class ServedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def begin_rpc(kind: str, name: str, rank: int) -> Any:
    from torch.distributed import rpc

    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"init_method": f"file://{os.environ['BENCH_RPC']}"}
    if "tcp" in kind:
        options |= {"_transports": ["uv"], "_channels": ["basic"]}
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**options))
    return rpc


def train_rpc(kind: str, settings: dict[str, Any]) -> dict[str, float]:
    from torch.distributed import autograd as dist_autograd
    from torch.distributed.optim import DistributedOptimizer

    rpc = begin_rpc(kind, "trainer", 1)
    table = rpc.remote("server", ServedEmbedding)
    linear, labels = nn.Linear(FIELDS * DIM, 1), torch.zeros(RECORDS)
    held = rpc.rpc_sync("server", parameters_of, args=(table,))
    own = [rpc.RRef(parameter) for parameter in linear.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, held + own, lr=LR)
    batches = draw_batches(settings["seed"], hashed=False)

    def step(ids: torch.Tensor) -> None:
        with dist_autograd.context() as context:
            rows = table.rpc_sync().forward(ids)
            loss = nn.functional.binary_cross_entropy_with_logits(linear(rows.flatten(1)).squeeze(1), labels)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)

    for ids in batches[:3]:
        step(ids)
    wait_for_go()
    meter = Meter(settings["seconds"])
    while True:
        step(batches[meter.steps % BATCHES])
        if not meter.count():
            break
    told = meter.tell()
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    rpc.shutdown()
    return told


def parameters_of(module: Any) -> list[Any]:
    from torch.distributed import rpc

    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def main() -> None:
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if kind.endswith("_server"):
        begin_rpc(kind, "server", 0).shutdown()
    elif kind.startswith("rpc"):
        train_rpc(kind, settings)
    else:
        sys.stdout.write(json.dumps(train_ours(settings, overlap=kind == "ours")) + "\n")


if __name__ == "__main__":
    main()
