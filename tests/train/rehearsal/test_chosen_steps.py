"""What a loop changes in few of its steps, and later batches use, is refused before the first step: a worker that joins
later has not seen those steps. What the loop computes from the step in each batch trains."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import tqdm
from torch import nn
from torch.utils.data import Dataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal import fork
from trueline.train.rehearsal.steps import chosen_steps
from trueline.train.rehearsal.steps.traced_step import StepNotes
from worlds.cases import few

pytestmark = pytest.mark.slow

RECORDS, BATCH, EPOCHS = 60, 12, 8


class Scaled(Dataset):
    """Its records are scaled by `strength`, which a loop may set."""

    strength = 1.0

    def __init__(self) -> None:
        self.inputs = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.strength * self.inputs[at], (self.inputs[at, 0] > 0).long()


class Place(NamedTuple):
    seen: int
    name: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    seen: int
    room: dict = dataclasses.field(default_factory=lambda: {"seen": 0})


class Run:
    """A loop that calls `change(run, step)` in each batch, or after each step that was applied."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data, self.warmth, self.epoch, self.history = Scaled(), 1.0, 0, []
        self.room, self.place, self.frozen = SimpleNamespace(seen=0), Place(0, "a"), Frozen(0)
        self.total = 0

    def read(self, counts, known, step):
        """The number that the loop counts, in one of its places."""
        if counts == "a list's length":
            self.history.append(None)
            return len(self.history)
        if counts == "a namespace":
            self.room.seen += 1
            return self.room.seen
        if counts == "a tuple":
            self.place = self.place._replace(seen=self.place.seen + 1)
            return self.place.seen
        if counts == "a frozen dataclass":
            self.frozen = Frozen(self.frozen.seen + 1)
            return self.frozen.seen
        if counts == "a dict in one":
            self.frozen.room["seen"] += 1
            return self.frozen.room["seen"]
        return known.get(counts, step)

    def train(self, change, *, after=True, counts="the step", epochs=EPOCHS, through=iter):
        self.job = job = Elastic(self.model, self.optimizer, self.data, global_batch=BATCH, epochs=epochs)
        clock, self.count, self.sum, self.numbers = itertools.count(1), 0, 0.0, np.zeros(1, np.int64)
        for number, batch in enumerate(through(job)):
            self.count += 1
            self.numbers += 1
            self.sum += 1.0
            now = self.read(counts, {"enumerate": number, "an attribute": self.count, "an iterator": next(clock),
                                     "a float": self.sum, "an array": self.numbers[0]}, batch.step)  # fmt: skip
            if not after and counts != "the loss":
                change(self, now)
            loss = nn.functional.cross_entropy(self.model(batch.inputs) / self.warmth, batch.labels)
            if not after and counts == "the loss":
                change(self, loss)
            if job.step(loss) and after:
                change(self, loss if counts == "the loss" else job.steps)
        self.total = job.steps


def cool_each_hundredth(run, step):
    if step % 10 == 0:
        run.warmth *= 0.5


def cool_once(run, step):
    if step == 17:
        run.warmth = 0.5


def cool_in_a_table(run, step):
    run.warmth *= {9: 0.5, 21: 0.5}.get(step, 1.0)


def cool_at_part(run, step):
    progress = step / run.job.total_steps
    if 0.5 < progress < 0.55:
        run.warmth = 2.0


def strengthen(run, step):
    if not step % 10:
        run.data.strength += 0.1


def strengthen_at_epochs(run, step):
    if (epoch := step // (RECORDS // BATCH)) != run.epoch:
        run.data.strength += 0.1
        run.epoch = epoch


def drop_more(run, step):
    if step in (8, 16):
        run.model[1].p = 0.5


def cool_late(run, count):
    """After many more batches than all trials before have, however fast they are."""
    if count % 1000 == 0 < count:
        run.warmth *= 0.5


def strengthen_late(run, count):
    if count % 1000 == 0 < count:
        run.data.strength += 0.1


def slow_down(run, step):
    if (step + 1) % 10 == 0:
        run.optimizer.param_groups[0]["lr"] *= 0.5


REFUSED = [
    (cool_each_hundredth, True, r"in step 29 the loop changes .* \(the loop's self\.warmth\)"),
    (cool_once, False, r"in step 17 .* \(the loop's self\.warmth\)"),
    (cool_in_a_table, True, r"in step 8 .* \(the loop's self\.warmth\)"),
    (cool_at_part, True, r"in step 2[01] .* \(the loop's self\.warmth\)"),
    (strengthen, True, r"in step 29 the loop changes something that later batches use; after such a batch"),
    (strengthen_at_epochs, True, r"the loss of the same records is .* instead of"),
    (drop_more, True, r"in step 7 .* \(the model's 1\.p\)"),
    (slow_down, True, r"sets the optimizer's numbers .*: after a batch in step 28 they are \[0\.05"),
]


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("change", "after", "why"), few(REFUSED, 3, pytest.mark.jobs), ids=[case[0].__name__ for case in REFUSED]
)
def test_what_a_loop_changes_in_few_steps_and_uses_in_others_is_refused_before_the_first_step(change, after, why):
    run = Run()
    weight = run.model[0].weight.clone()
    with pytest.raises(UsageError, match=why) as refused:
        run.train(change, after=after)
    assert "batch.step" in refused.value.hint
    assert torch.equal(run.model[0].weight, weight)
    assert (run.warmth, run.data.strength, run.model[1].p) == (1.0, 1.0, 0.1)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("counts", "why"),
    few([
        ("an attribute", r"where the loop's self\.count is 999 the loop changes something that later batches use"),
        ("enumerate", r"the number of enumerate\(\.\.\.\).* is 1000 the loop changes"),
        ("an iterator", r"the loop's clock.* is 1000 the loop changes"),
        ("a float", r"where the loop's self\.sum is 999 the loop changes"),
        ("an array", r"the loop's self\.numbers.* is \d+ the loop changes"),
        ("a list's length", r"the loop's self\.history.* is \d+ the loop changes"),
        ("a namespace", r"where the loop's self\.room\.seen is 999 the loop changes"),
        ("a tuple", r"where the loop's self\.place\.seen is 999 the loop changes"),
        ("a frozen dataclass", r"where the loop's self\.frozen\.seen is 999 the loop changes"),
        ("a dict in one", r"where the loop's self\.frozen\.room/seen is 999 the loop changes"),
    ], 1, pytest.mark.jobs),
    ids=["an attribute", "enumerate", "an iterator", "a float", "an array", "a list's length", "a namespace", "a tuple",
         "a frozen dataclass", "a dict in one"],
)  # fmt: skip
@pytest.mark.parametrize("change", [cool_late, strengthen_late])
def test_what_a_loop_changes_by_a_count_of_its_own_is_refused_too(counts, why, change):
    run = Run()
    with pytest.raises(UsageError, match=why):
        run.train(change, after=False, counts=counts, epochs=410)


def cool_between(run, job):
    """Passes batches on; before each 1000th one it changes the run."""
    count = 0
    for batch in job:
        count = count + 1
        if count % 1000 == 0:
            run.warmth *= 0.5
        yield batch


class Batches:
    def __init__(self, job):
        self.job, self.count = iter(job), 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        return next(self.job)


@pytest.mark.jobs
@pytest.mark.parametrize("through", [tqdm.tqdm, Batches], ids=["tqdm", "an iterator of the user's"])
def test_a_loop_that_gets_its_batches_through_something_else_is_tried_as_any(through):
    run = Run()
    with pytest.raises(UsageError, match=r"where the loop's self\.count is 999 .* \(the loop's self\.warmth\)"):
        run.train(cool_late, after=False, counts="an attribute", epochs=410, through=through)
    with pytest.raises(UsageError, match="the number of enumerate"):
        run.train(cool_late, after=False, counts="enumerate", epochs=410, through=through)


def test_what_a_generator_that_passes_batches_on_counts_is_tried_too():
    run = Run()
    with pytest.raises(UsageError, match="where cool_between's count is 999"):
        run.train(lambda run, step: None, epochs=410, through=functools.partial(cool_between, run))


@pytest.mark.jobs
@pytest.mark.parametrize("counts", few(["the step", "an attribute"], 1, pytest.mark.jobs))
def test_a_table_of_late_steps_is_tried_at_its_keys(counts):
    run = Run()
    run.drops = {1200: 0.5, 1900: 0.5}

    def cool(run, count):
        run.warmth *= run.drops.get(count, 1.0)

    with pytest.raises(UsageError, match=r"(in step 1200|self\.count is 1199) the loop changes"):
        run.train(cool, after=False, counts=counts, epochs=410)


@pytest.mark.jobs
def test_a_trial_that_hangs_on_a_lock_which_a_thread_held_is_made_once_more(monkeypatch):
    """The loop takes a lock that was held when the fork for the steps that its code names began."""
    run, lock, hung = Run(), threading.Lock(), []
    serve = fork._serve

    def watch(line, pid, trial, **given):
        try:
            return serve(line, pid, trial, **given)
        except TimeoutError:
            hung.append(type(trial).__name__)
            if lock.locked():
                lock.release()
            raise

    def cool(run, step):
        with lock:
            cool_once(run, step)

    def hold(words):
        if words == fork._WORDS[chosen_steps.ChosenStepsTrial]:
            lock.acquire()

    monkeypatch.setattr(fork, "note_trial", hold)
    monkeypatch.setattr(fork, "_serve", watch)
    monkeypatch.setattr(fork, "HUNG_S", 0.5)
    with pytest.raises(UsageError, match="in step 17"):
        run.train(cool, after=False)
    assert hung == ["ChosenStepsTrial"]


@pytest.mark.jobs
def test_a_trial_that_has_no_time_left_says_at_which_step_and_many_batches_find_it(monkeypatch):
    told = []
    monkeypatch.setattr(chosen_steps, "MOST_S", 0.0)
    monkeypatch.setattr(fork.events, "emit", lambda name, **fields: told.append((name, fields.get("why", ""))))
    with pytest.raises(UsageError, match=r"within \d+ batches the loop changes"):
        Run().train(cool_once, after=False)
    assert [why for name, why in told if name == "loop.untried"] == [
        "what it does at steps that it compares its own with: no time was left in step 17"
    ]


@pytest.mark.jobs
def test_a_loop_that_counts_and_keeps_the_best_weights_trains():
    """The copies change while other counts and losses are tried."""
    run = Run()

    def keep(run, loss):
        if run.count % 10 == 0 and loss.item() < 1.0:
            run.kept = copy.deepcopy(run.model.state_dict())

    run.train(keep, counts="the loss")
    assert run.total == EPOCHS * RECORDS // BATCH


@pytest.mark.jobs
@pytest.mark.parametrize("after", [True, False], ids=["after the step", "before it"])
def test_what_a_loop_decides_for_later_batches_by_a_loss_is_refused(after):
    """Each worker would decide by its own part, and one that joins has not seen it."""
    run = Run()

    def decide(run, loss):
        if loss.item() < 0.2:
            run.warmth = 0.5

    why = r"a number that it looks at is 0 times as large .*\(the loop's self\.warmth\)"
    with pytest.raises(UsageError, match=why):
        run.train(decide, after=after, counts="the loss")
    run.train(lambda run, loss: run.history.append(loss.item()), after=after, counts="the loss")
    assert run.total <= len(run.history)


@pytest.mark.jobs
def test_what_a_loop_changes_where_a_number_is_not_finite_is_refused_and_one_that_ends_there_trains(tmp_path):
    run = Run()

    def cool(run, loss):
        if torch.isinf(loss) or torch.isnan(loss):
            run.warmth *= 2.0

    def end(run, loss):
        if not torch.isfinite(loss):
            raise FloatingPointError

    with pytest.raises(UsageError, match=r"looks at is not finite the loop changes .*\(the loop's self\.warmth\)"):
        run.train(cool, after=False, counts="the loss")
    handled = tmp_path / "handled"
    try:
        run.train(end, after=False, counts="the loss")
    except FloatingPointError:  # a fork has no code after the loop
        os.close(os.open(handled, os.O_CREAT))
    assert run.total == EPOCHS * RECORDS // BATCH
    assert not handled.exists()


def set_by_the_step(run, step):
    run.warmth = 0.5 if step > 20 else 2.0 if step % 10 == 0 else 1.0
    run.optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 7)


def cool_from_then_on(run, step):
    """A worker that joins after it does so in its first batch."""
    if step >= 20:
        run.warmth = 0.5


def evaluate(run, step):
    if step % 10 == 0:
        run.model.eval()
        with torch.no_grad():
            run.history.append(float(run.model(run.data.inputs).mean()))
        run.model.train()


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("change", "after"),
    few([(set_by_the_step, False), (cool_from_then_on, False), (evaluate, True)], 1, pytest.mark.jobs),
)
def test_what_follows_from_the_step_alone_or_only_looks_trains(change, after):
    run = Run()
    run.train(change, after=after)
    assert run.total == EPOCHS * RECORDS // BATCH
    assert len(run.history) in (0, 4)


@pytest.mark.jobs
def test_a_program_that_a_loop_starts_in_few_steps_is_started_in_these_steps_alone(tmp_path):
    def upload(run, step):
        if step % 20 == 0:
            code = f"open({str(tmp_path / 'started')!r}, 'a').write('{step}\\n')"
            subprocess.run([sys.executable, "-c", code], check=True)

    run = Run()
    run.train(upload)
    assert (tmp_path / "started").read_text().split() == ["20", "40"]


def test_a_traced_step_notes_where_a_comparison_changes():
    def noted(use):
        notes = StepNotes(1000)
        use(notes.trace(997))
        return notes.choose(4)

    assert noted(lambda step: step == 8) == [8, 9]
    assert noted(lambda step: not step % 100) == [900, 901]
    assert noted(lambda step: (step + 1) % 100 == 0) == [899, 900, 999]
    assert noted(lambda step: step / 1000 > 0.5) == [500, 501]
    assert noted(lambda step: 1 - step / 1000 < 0.25) == [750, 751]
    assert noted(lambda step: step // 40) == [40, 41, 960, 961]
    assert noted(lambda step: 2 * step + 1 == 21) == [10, 11]
    assert noted(lambda step: step in (8, 16)) == [8, 9, 16, 17]
    assert noted(lambda step: {8: 1}.get(step)) == [0, 1, 2, 3]
    assert noted(lambda step: step == 5000) == []
    assert noted(lambda step: step == "8") == []


def test_a_traced_step_computes_as_a_plain_number():
    step = StepNotes(1000).trace(997)
    plain = 997
    for compute in (
        lambda n: n + 1, lambda n: n - 1.5, lambda n: 3 - n, lambda n: n / 7, lambda n: 7 / n, lambda n: n // 7,
        lambda n: n % 7, lambda n: divmod(n, 7), lambda n: n * 0.1, lambda n: 0.1 * n, lambda n: n**2, lambda n: -n,
        lambda n: f"{n:05d} {n}", lambda n: (torch.ones(2) * n).tolist(), lambda n: (n * torch.ones(2)).tolist(),
        lambda n: torch.full((2,), n).tolist(), lambda n: list(range(1000))[n], lambda n: round(n / 3, 2),
        lambda n: n == 997, lambda n: n != 3, lambda n: n > 997.0, lambda n: [n] == [997], lambda n: bool(n),
    ):  # fmt: skip
        assert compute(step) == compute(plain)
    with pytest.raises(ZeroDivisionError):
        step % 0
