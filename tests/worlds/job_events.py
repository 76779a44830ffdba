"""Streams of events as a master publishes them, for tests of subscribers: a storm of deaths, a start, a failure."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = tuple[str, dict[str, Any], float]
PLACE = "record 717 of clicks-3.parquet#1"
BEGAN = 1_790_000_000.0
REASONS = ("killed by SIGKILL", "killed by SIGKILL", "silent for 3.1 s", "killed by SIGSEGV", "exit code 1")


class Story:
    """Publishes a job's events and keeps the clock."""

    def __init__(self, *, workers: int = 4, total: int = 1000, epochs: int = 5, seed: int = 0) -> None:
        self.workers, self.total, self.epochs, self.random = workers, total, epochs, random.Random(seed)
        self.at, self.step, self.generation, self.next_gap_ms = BEGAN, 0, 0, 0.0
        self.incarnations = dict.fromkeys(range(workers), 0)
        self.alive: list[int] = []

    def say(self, name: str, **fields: Any) -> Event:
        return name, fields, self.at

    def ref(self, slot: int) -> str:
        return f"worker-{slot}.{self.incarnations[slot]}"

    def start(self) -> Iterator[Event]:
        for slot in range(self.workers):
            yield self.say("worker.started", worker=self.ref(slot))
            yield self.say("worker.running", worker=self.ref(slot), pid=100 + slot)
        for slot in range(self.workers):
            self.at += self.random.uniform(0.4, 1.2)
            yield from self.join(slot)
        yield from self.view("all are ready")

    def join(self, slot: int) -> Iterator[Event]:
        yield self.say("worker.joined", worker=self.ref(slot), total_steps=self.total)
        self.alive = sorted({*self.alive, slot})

    def view(self, why: str) -> Iterator[Event]:
        self.generation += 1
        members = json.dumps([self.ref(slot) for slot in self.alive])
        fields = {"generation": self.generation, "workers": len(self.alive), "why": why, "members": members}
        yield self.say("view.published", **fields)

    def die(self, slot: int, why: str = "killed by SIGKILL") -> Iterator[Event]:
        yield self.say("worker.lost", worker=self.ref(slot), why=why)
        self.alive.remove(slot)
        yield from self.view(f"{self.ref(slot)} is gone: {why}")
        self.next_gap_ms = self.random.uniform(30, 180)
        self.at += self.next_gap_ms / 1e3

    def replace(self, slot: int) -> Iterator[Event]:
        self.incarnations[slot] += 1
        yield self.say("worker.started", worker=self.ref(slot))

    def joined(self, slot: int) -> Iterator[Event]:
        yield from self.join(slot)
        yield from self.view(f"{self.ref(slot)} joins")
        self.next_gap_ms = self.random.uniform(15, 40)

    def steps(self, num: int, *, step_s: float = 0.2) -> Iterator[Event]:
        for _ in range(num):
            share = max(len(self.alive), 1)
            compute, wait = 4000 * step_s * 0.6 / share, self.random.uniform(10, 30) * step_s * 5
            self.at += (compute + wait + 25 * step_s) / 1e3 + step_s * 0.05
            loss = 2.3 * math.exp(-self.step / self.total * 4) + 0.12 + self.random.gauss(0, 0.05)
            fields = {"step": self.step, "total": self.total, "loss": abs(loss), "workers": share, "records": 64,
                      "generation": self.generation, "gap_ms": self.next_gap_ms, "rates": json.dumps([900.0] * share),
                      "shares": json.dumps([64 // share] * share), "data_ms": 12 * step_s, "compute_ms": compute,
                      "wait_ms": wait, "commit_ms": 9 * step_s, "redone": 0}  # fmt: skip
            self.next_gap_ms = 0.0
            yield self.say("step.applied", **fields)
            self.step += 1
            if self.step % (self.total // self.epochs) == 0:
                yield from self.epoch()

    def epoch(self) -> Iterator[Event]:
        num = self.total // self.epochs
        number = self.step // num - 1
        yield self.say("epoch.certified", epoch=number, steps=num, records=num * 64, digest=7, tally_min=1, tally_max=1)
        loss = 2.1 * math.exp(-self.step / self.total * 3) + 0.2 + 0.1 * (number == self.epochs - 1)
        metrics = json.dumps({"accuracy": 1 - loss / 4})
        yield self.say("evaluation.done", step=self.step, records=360, loss=loss, metrics=metrics,
                       best=number < self.epochs - 1, stop=False)  # fmt: skip
        yield self.say("checkpoint.saved", step=self.step, path="step", digest="d")


def storm(*, total: int = 4000, deaths: int = 40, workers: int = 6, end: bool = True) -> Iterator[Event]:
    """A long job in which workers die repeatedly; one slot ends in quarantine, one record is set aside."""
    story = Story(workers=workers, total=total, epochs=10)
    yield from story.start()
    every = total // (deaths + 1)
    for number in range(deaths):
        yield from story.steps(every // 2)
        slot = story.random.choice(story.alive)
        yield from story.die(slot, story.random.choice(REASONS))
        if number == deaths // 2:
            yield story.say("record.suspected", record=1717, why="ValueError: image has 3 bytes, expected 64")
            where, why = PLACE, "ValueError: image has 3 bytes, expected 64"
            yield story.say("record.set_aside", record=1717, where=where, why=why)
        if number == deaths - 8:
            yield story.say("worker.quarantined", slot=slot, why="3 deaths in a row before a step of its own")
            continue
        yield from story.replace(slot)
        yield from story.steps(every - every // 2)
        yield from story.joined(slot)
    left = story.alive[-1]
    yield story.say("worker.leaving", worker=story.ref(left))
    story.alive.remove(left)
    yield from story.view(f"{story.ref(left)} leaves")
    yield from story.steps(total - story.step if end else 5)
    if end:
        yield story.say("job.finished", steps=total, summary="{}")


def beginning() -> Iterator[Event]:
    """Workers have been started and two of three are ready."""
    story = Story(workers=3)
    for slot in range(3):
        yield story.say("worker.started", worker=story.ref(slot))
    for slot in range(2):
        story.at += 0.9
        yield from story.join(slot)


def failure() -> Iterator[Event]:
    """A job that ends with an error of the recipe."""
    story = Story(workers=3, total=500)
    yield from story.start()
    yield from story.steps(180)
    why = "worker-1.0: ValueError at recipe.py:31: expected 64 pixels, found 63"
    yield story.say("job.failed", code="recipe", why=why, hint="mend the recipe, then continue with --resume")


def job_folder(folder: Path, events: Iterator[Event] | list[Event], **settings: Any) -> Path:
    """A job's folder as its master leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"name": folder.name, "recipe": "/home/me/digits/recipe.py", "recipe_digest": "d" * 64, "epochs": 10,
             "global_batch": 64, "workers": 6, "min_workers": 2, "seed": 0}  # fmt: skip
    (folder / "job.json").write_text(json.dumps(facts | settings))
    with (folder / "events.jsonl").open("w") as log:
        for seq, (name, fields, at) in enumerate(events, 1):
            log.write(json.dumps({"at": at, "seq": seq, "name": name, "fields": fields}) + "\n")
    return folder
