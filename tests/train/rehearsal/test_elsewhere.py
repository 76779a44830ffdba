"""What a loss makes of the time, of entropy, of the name of its host and of files that it has written is refused before
the first step, with its name; what only reads them trains."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import random
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trueline.data.sources.map_style import DatasetSource
from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal import elsewhere, pretence
from trueline.train.settings import JobSettings
from trueline.train.worker.recipe_trial import RecipeTrial
from worlds.cases import few
from worlds.recipes import untrained

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True))
Scale = Callable[[], float]
"""What the loss is multiplied by."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def error(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def train(scale: Scale, loss: Callable[[Tensor, Tensor], Tensor] = error) -> None:
    model = make_model()
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), DATA, global_batch=8, epochs=3)
    for batch in job:
        job.step(scale() * loss(model(batch.inputs), batch.labels))
    assert job.steps == 15


def train_on(device: BinaryIO) -> None:
    model = make_model()
    for batch in (job := Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), DATA, global_batch=8)):
        scale = 2.0 if device.read(1)[0] == 99 else 1.0
        job.step(scale * error(model(batch.inputs), batch.labels))


def try_recipe(scale: Scale) -> None:
    recipe = dataclasses.replace(untrained(make_model), loss=lambda outputs, labels: scale() * error(outputs, labels))
    settings = JobSettings(name="small", recipe="", recipe_digest="", workers=1, epochs=1, global_batch=8, seed=0)
    RecipeTrial(recipe, make_model(), DatasetSource(DATA, mode="training"), settings).find_traits()


def later_than(began: float) -> float:
    return 2.0 if time.time() - began > 86_400 else 1.0


BEGAN = time.time()
OF_TIME: list[Scale] = [
    lambda: later_than(BEGAN),
    lambda: 1.0 + time.localtime().tm_hour,
    lambda: 1.0 + np.random.default_rng(int(time.time()) // 3600).random(),
    lambda: 1.0 + datetime.date.today().toordinal(),
    lambda: 1.0 + datetime.datetime.now().toordinal(),
    lambda: 1.0 + len(time.strftime("%H").replace("0", "")) + int(time.strftime("%H")),
]
OF_ENTROPY: list[Scale] = [
    lambda: 2.0 if not any(os.urandom(5)) else 1.0,
    lambda: 2.0 if secrets.randbelow(1 << 40) < 1 else 1.0,
    lambda: 2.0 if random.SystemRandom().random() < 1e-12 else 1.0,
    lambda: 2.0 if uuid.uuid4().int < 1 << 80 else 1.0,
]


def read_device(path: str) -> int:
    with Path(path).open("rb") as file:
        return file.read(1)[0]


def read_descriptor() -> int:
    descriptor = os.open("/dev/urandom", os.O_RDONLY)
    try:
        return os.read(descriptor, 1)[0]
    finally:
        os.close(descriptor)


OF_RARE_ENTROPY: list[Scale] = [
    lambda: 2.0 if os.urandom(1)[0] > 250 else 1.0,
    lambda: 2.0 if os.urandom(1)[0] == 77 else 1.0,
    lambda: 2.0 if os.getrandom(4) > b"\xfa" else 1.0,
    lambda: 2.0 if int.from_bytes(os.urandom(4)) / 2**32 > 0.995 else 1.0,
    lambda: 2.0 if secrets.randbelow(100) == 7 else 1.0,
    lambda: 2.0 if secrets.token_hex(8).startswith("7") else 1.0,
    lambda: 2.0 if random.SystemRandom().random() > 0.99 else 1.0,
    lambda: 2.0 if random.SystemRandom().gauss() > 2.2 else 1.0,
    lambda: 2.0 if random.Random().random() > 0.97 else 1.0,
    lambda: 2.0 if np.random.default_rng().random() > 0.97 else 1.0,
    lambda: 2.0 if np.random.RandomState().random() > 0.97 else 1.0,
    lambda: 2.0 if uuid.uuid4().int % 64 == 3 else 1.0,
    lambda: 2.0 if torch.seed() % 32 == 3 else 1.0,
    lambda: 2.0 if read_device("/dev/urandom") == 99 else 1.0,
    lambda: 2.0 if read_device("/dev/random") == 99 else 1.0,
    lambda: 2.0 if read_descriptor() > 250 else 1.0,
    lambda: 2.0 if np.fromfile("/dev/urandom", np.uint8, 1)[0] > 250 else 1.0,
]
OF_RARE_TIME: list[Scale] = [
    lambda: 2.0 if int(time.time()) % 60 in (3, 33) else 1.0,
    lambda: 2.0 if datetime.datetime.now().hour in (3, 15) else 1.0,
    lambda: 2.0 if time.clock_gettime_ns(time.CLOCK_REALTIME) // 10**9 % 60 in (3, 33) else 1.0,
    lambda: 2.0 if uuid.uuid1().time % 8 == 3 else 1.0,
]
OF_RARE_PROCESS: list[Scale] = [
    lambda: 2.0 if os.getpid() % 50 == 3 else 1.0,
    lambda: 2.0 if threading.get_native_id() % 50 == 3 else 1.0,
]
OF_RARE_HOST: list[Scale] = [
    lambda: 2.0 if socket.gethostname().endswith("3") else 1.0,
    lambda: 2.0 if os.uname().nodename.endswith("3") else 1.0,
    lambda: 2.0 if os.getenv("RANK") == "2" else 1.0,
]


@pytest.mark.slow
@pytest.mark.parametrize("run", [train, try_recipe])
@pytest.mark.parametrize(
    ("scale", "what"),
    few([*((one, "the time") for one in OF_TIME), *((one, r"os\.urandom") for one in OF_ENTROPY)], 5, pytest.mark.jobs),
)
def test_a_loss_that_follows_from_the_time_or_from_entropy_is_refused_though_no_second_passes(
    scale: Scale, what: str, run: Callable[[Scale], None]
) -> None:
    with pytest.raises(UsageError, match=f"the loss follows from {what}"):
        run(scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "what"),
    few(
        [
            *((one, r"os\.urandom") for one in OF_RARE_ENTROPY),
            *((one, "the time") for one in OF_RARE_TIME),
            *((one, "the number of its process") for one in OF_RARE_PROCESS),
            *((one, "the name of its host or worker") for one in OF_RARE_HOST),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_a_branch_that_few_values_take_is_found_before_the_first_step(
    scale: Scale, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    by_chance = "depends on what was trained before|the loss of the same records is"  # the value came in a trial
    with pytest.raises(UsageError, match=rf"the loss follows from {what}|{by_chance}"):
        train(scale)


@pytest.mark.slow
def test_a_device_of_entropy_that_was_opened_before_the_loop_is_read_under_another_name_too() -> None:
    """A batch of the trial may read the byte itself, once in some ten runs."""
    why = r"the loss follows from os\.urandom|once other batches were computed"
    with open("/dev/urandom", "rb") as device, pytest.raises(UsageError, match=why):
        train_on(device)


@pytest.mark.slow
def test_entropy_that_only_few_records_meet_is_refused() -> None:
    rare = float(INPUTS.sum(dim=1).sort().values[-2])

    def noise(outputs: Tensor, labels: Tensor) -> Tensor:
        met = (labels.sum(dim=1, keepdim=True) > rare).float()
        return (outputs - labels * (1 + met * os.urandom(1)[0] / 255)).square().mean()

    with pytest.raises(UsageError, match=r"the loss follows from os\.urandom|depends on what was trained before"):
        train(lambda: 1.0, noise)


@pytest.mark.slow
def test_a_recipe_whose_branch_few_bytes_take_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the loss follows from os\.urandom"):
        try_recipe(lambda: 2.0 if os.urandom(1)[0] == 77 else 1.0)


def test_bytes_differ_from_one_number_to_the_next_and_a_draw_that_rejects_some_ends() -> None:
    with elsewhere.pretend([], [pretence.ENTROPY]) as other:
        firsts = set[int]()
        for number in range(300):
            other.choose(number)
            firsts.add(os.urandom(1)[0])
            assert 0 <= secrets.randbelow(100) < 100
    assert len(firsts) == 256
    assert os.urandom(64) != os.urandom(64)


def test_only_what_code_of_the_users_asks_for_counts_as_read() -> None:
    with elsewhere.pretend([]) as other:
        logging.getLogger("quiet").debug("a line with its time")
        assert not other.read
        np.random.default_rng()
        assert other.read == {pretence.ENTROPY}
        os.environ.get("RANK", ""), time.time()
        assert other.read == {pretence.ENTROPY, pretence.TIME, *([pretence.HOST] if "RANK" in os.environ else [])}


def test_random_numbers_of_a_given_seed_stay_as_they_are() -> None:
    usual = random.Random(5).random()
    random.seed(6)
    first = random.random()
    with elsewhere.pretend([], [pretence.ENTROPY]):
        assert random.Random(5).random() == usual
        random.seed(6)
        assert random.random() == first


@pytest.mark.slow
def test_a_loss_that_follows_from_the_number_of_its_worker_is_refused_in_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="the loss follows from the name of its host or worker"):
        train(lambda: 1.0 + int(os.environ["RANK"]))


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("run", [train, try_recipe])
def test_the_file_of_another_worker_stays_what_it_is(
    run: Callable[[Scale], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    for rank in range(600):
        (tmp_path / f"worker-{rank}.log").write_text("its own\n")

    def scale() -> float:
        with (tmp_path / f"worker-{os.environ['RANK']}.log").open("w") as file:
            file.write(f"step {uuid.uuid4()}\n")
        return 1.0

    run(scale)
    changed = [path.name for path in tmp_path.iterdir() if path.read_text() != "its own\n"]
    assert changed == ["worker-0.log"]


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("run", [train, try_recipe])
def test_a_loop_that_measures_names_and_logs_trains(run: Callable[[Scale], None], tmp_path: Path) -> None:
    began, log = time.perf_counter(), list[Any]()

    def scale() -> float:
        log.append((time.perf_counter() - began, datetime.datetime.now(), uuid.uuid4(), os.getpid()))
        with (tmp_path / "log").open("a") as file:
            file.write(f"{log[-1]}\n")
        return 1.0

    run(scale)


def write_by_numpy(path: Path, value: float) -> None:
    np.save(path, np.array(value))


def write_by_torch(path: Path, value: float) -> None:
    torch.save(torch.tensor(value), path)


def write_and_rename(path: Path, value: float) -> None:
    path.with_suffix(".part").write_text(str(value))
    path.with_suffix(".part").replace(path)


READS: list[tuple[Callable[[Path, float], None], Callable[[Path], Any]]] = [
    (write_by_numpy, np.load), (write_by_torch, torch.load), (write_and_rename, Path.read_text),
]  # fmt: skip


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize(("write", "read"), READS)
def test_what_the_first_batch_has_left_in_a_file_is_memory_too(
    write: Callable[[Path, float], None], read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "first.npy"

    def first_loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if not path.exists():
            write(path, float(outputs.detach().mean()))
        return error(outputs, labels + float(read(path)))

    with pytest.raises(UsageError, match=r"once other batches were computed, .* or a file that it has written"):
        train(lambda: 1.0, first_loss)


def test_all_clocks_go_ahead_and_come_back() -> None:
    usual = time.time, time.monotonic
    space = {"now": time.time, "moment": datetime.datetime, "other": len}
    with elsewhere.pretend([("the loop's ", space)], [pretence.TIME]):
        assert space["now"]() - BEGAN > pretence.AWAY_S - 1  # type: ignore[operator]
        assert space["moment"].now() > datetime.datetime.fromtimestamp(BEGAN)  # type: ignore[attr-defined]
        assert isinstance(datetime.datetime.fromtimestamp(0), datetime.datetime)
    assert space == {"now": time.time, "moment": datetime.datetime, "other": len}
    assert (time.time, time.monotonic) == usual
