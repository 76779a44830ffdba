"""Whether all workers of a job compute the same loss: what each of them makes for itself is compared before it trains.

A frozen teacher, random features, class weights, the order of a vocabulary: a loss reads them, and they are in no state
that travels. So the first worker leaves, for all that come later, the loss of some records and a digest of each value
that Python code has before the first batch. Another worker computes the same, and where digests differ once more
with other values there, which shows whether the loss uses them.

    loss, as the model begins    in workers that begin with the same parameters
    loss at made-up parameters   in the others, which is allowed: the state of the first worker travels
    digests by name              for values that these records do not need, and for the name of what differs
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueline import events
from trueline.data.loading import seeding
from trueline.errors import UsageError, join_names
from trueline.full_disk import write_when_room
from trueline.train import devices, dynamo
from trueline.train.job_dir import JobDir
from trueline.train.link.grpc_client import settle_on_master
from trueline.train.rehearsal import contents, generators, kept, places
from trueline.train.rehearsal.contents import CollectionItems
from trueline.train.rehearsal.copies import can_look
from trueline.train.rehearsal.places import KeptPlace
from trueline.train.step import model_traits
from trueline.train.step.contribution import StepBatch
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.plan import Ints, choose_late
from trueline.train.step.trial import QUICK_S, LossTrial, TrialInputs

WHOLE_BYTES, PARTS = 16 << 20, 1 << 18
"""Up to which size all of a tensor is hashed, and how many elements of a larger one."""
ODD_BYTES = 64 << 20
"""A larger model is not tried at made-up parameters, which takes a copy."""
FEW = 2
"""Records where a few take long."""
SHORT = 40
"""Letters of numbers that are not hashed."""
LOSS, GRADIENTS = 1e-5, 1e-3
"""Relative differences that two processors of one kind may have."""
_MAKES = "each worker makes it for itself"
_HINT = (
    f"{_MAKES}: seed the generator that it comes from (torch.manual_seed(0), np.random.default_rng(0)), read it from a "
    "file, sort what comes from a set, or make it a part of the model (self.register_buffer), whose state the workers "
    "receive"
)
_SETTLED = ("draws", "reduction", "even", "whole", "buffers", "skips", "half", "form", "divisors",
            "looks", "reads", "records")  # fmt: skip
"""What the first worker finds out for all others of the job, in JOB/loss.json, or on the master."""
Shown = list[float]


class AlikeTrial:
    """`batches()` are for the loop, each followed by a call of `take`; `reads` is then what other workers compare with.

    `first`: what the first worker has found; none: this is the first one, and `tried` is on its way. `batches()` raises
    UsageError if the loss of this worker is another. `changes`: the loop is tried with other values, at which it may
    raise.
    """

    failed = False

    def __init__(
        self,
        tried: LossTrial,
        spaces: Callable[[], Iterable[tuple[str, Any]]],
        first: ModelTraits | None = None,
        *,
        changes: bool = True,
    ) -> None:
        self._tried, self._model, self._changes = tried, tried.inputs.model, changes
        self._first: dict[str, Any] = first.reads if first is not None else {}
        self._moving = set(first.buffers if first is not None else ())
        self.inputs: TrialInputs = tried.inputs
        if first is not None:
            self.inputs = replace(tried.inputs, chosen=np.array(self._first["ids"], np.int64))
        self.compared = False
        self._memory = kept.KeptNames(self._model, spaces)
        self._spaces = spaces
        self._drawn: dict[str, Any] = {}
        """States of the loop's own generators."""
        self._values: dict[str, str] = {}
        self._taken: list[Shown] = []
        self.reads: dict[str, Any] = {}

    def belong_to(self, tried: LossTrial) -> LossTrial:
        """Makes `tried` hand out the batches of this one among its own."""
        self._tried, tried.alike = tried, self
        return tried

    def look(self) -> None:
        """Hashes what there is before the first batch."""
        until = time.monotonic() + contents.LOOK_S
        self._values = {place.name: describe(place.value, until) for place in self._list_places()}
        self._drawn = self._read_generators()

    def _read_generators(self) -> dict[str, Any]:
        found = generators.list_generators(self._model, self._spaces)
        return {name: generators.read_state(one) for name, one in found.items()}

    def batches(self, ids: Ints | None = None) -> Generator[StepBatch, None, None]:
        """`ids`: records that the loss could be computed of, if this is the first worker."""
        before, self._tried.after = self._tried.after, self.take
        eager = torch.compiler.set_stance("force_eager") if dynamo.is_loaded() else nullcontext()
        try:
            with seeding.preserve_generators(), eager:
                yield from self._leave(ids) if ids is not None else self._compare()
        finally:
            self._tried.after = before

    def take(self, loss: torch.Tensor) -> bool:
        self._taken.append(self._tried.show(loss))
        return False

    def answer(self) -> dict[str, Any]:
        return {"tried": True}

    def accept(self, answer: dict[str, Any]) -> None:
        self.compared = bool(answer)

    def _leave(self, ids: Ints) -> Generator[StepBatch, None, None]:
        """The first worker's side."""
        slow = self._tried.took_s >= QUICK_S
        ids = ids[:FEW] if slow else ids
        steps = [0] if slow else sorted({0, choose_late(self.inputs.total_steps)})
        shown: list[Shown] = []
        for step in steps:
            shown.append((yield from self._show(ids, step)))
        odd: Shown = []
        if not slow and sum(value.nbytes for _, value in self._list_state()) <= ODD_BYTES:
            with self._make_up():
                odd = yield from self._show(ids, 0)
        self.reads = {
            "ids": [int(one) for one in ids], "steps": steps, "shown": shown, "odd": odd, "state": self._hash_state(),
            "values": self._values, "kind": self._name_kind(),
            "moved": [name for name, now in self._read_generators().items() if self._drawn.get(name, now) != now],
        }  # fmt: skip

    def _compare(self) -> Generator[StepBatch, None, None]:
        """Another worker's side."""
        first, ids = self._first, self.inputs.chosen
        assert ids is not None
        if first["kind"][0] != self._name_kind()[0]:  # another device draws other numbers
            self.compared = True
            return
        self.look()
        same = first["state"] == self._hash_state()
        pairs: list[tuple[Shown, Shown]] = []
        for step, shown in zip(first["steps"], first["shown"], strict=True):
            found = yield from self._show(ids, step)
            pairs.append((shown if same else found, found))
        if not same and first["odd"]:
            with self._make_up():
                pairs.append((first["odd"], (yield from self._show(ids, 0))))
        differing = self._list_differing()
        for name, changed in list(differing.items())[: kept.MOST_TRIED] if self._changes else ():
            yield from self._expect_unused(name, changed, [found for _, found in pairs])
        for shown, found in pairs:
            if not self._is_alike(shown, found):
                raise UsageError(
                    f"the loss is not that of the first worker: {kept.compare(shown, found)}, with equal parameters "
                    "and seeds. It reads something that the workers do not have in common"
                    + (f"; what differs by name: {join_names(list(differing))}" if differing else ""),
                    hint=_HINT,
                )
        self.compared = True

    def _show(self, ids: Ints, step: int) -> Generator[StepBatch, None, Shown]:
        trial, count = self.inputs, len(self._taken)
        batch = trial.reader.read(ids, epoch=0)
        with model_traits.restore_buffers(self._model):
            seeding.seed_all(trial.seed, 0, 0)
            yield StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, step=step, weight=1.0, trial=True)
        if len(self._taken) == count:
            raise UsageError("the loop did not call job.step(loss)", hint="call it once for every batch")
        return self._taken[-1]

    def _expect_unused(
        self, name: str, changed: list[KeptPlace], usual: list[Shown]
    ) -> Generator[StepBatch, None, None]:
        """Raises UsageError if the loss uses the places of `name`, whose values are not those of the first worker."""
        ids = self.inputs.chosen
        assert ids is not None
        for step, shown in zip(self._first["steps"], usual, strict=True):
            with ExitStack() as stack:
                for place in changed:
                    stack.enter_context(kept.change(place, -kept.FAR))  # the start of a clock is long ago then
                found = yield from self._show(ids, step)
            if not kept.is_same(shown, found):
                raise UsageError(
                    f"the loss uses {name}, which is not that of the first worker: with another value there "
                    f"{kept.compare(shown, found)}",
                    hint=_HINT,
                )

    def _list_differing(self) -> dict[str, list[KeptPlace]]:
        """What differs from the first worker's, by the name at its root: a module has many tensors."""
        theirs, found = self._first["values"], dict[str, list[KeptPlace]]()
        names = {name for name, mine in self._values.items() if not contents.is_same(theirs.get(name, mine), mine)}
        for place in self._list_places() if names else ():
            if place.name in names:
                found.setdefault(place.root, []).append(place)
        return {name_together([place.name for place in some]): some for some in found.values()}

    def _is_alike(self, shown: Shown, found: Shown) -> bool:
        """Whether losses and gradients of two workers are equal, but for the rounding of their processors."""
        if not all(map(math.isfinite, shown)):
            return True
        least = (
            self._tried.tolerance if self._first["kind"] != self._name_kind() or self._tried.tolerance > 1e-4 else 0.0
        )
        pairs = zip(shown, found, strict=False)
        limits = (max(GRADIENTS if at else LOSS, least) for at in range(len(shown)))
        close = (math.isclose(a, b, rel_tol=limit, abs_tol=1e-9) for (a, b), limit in zip(pairs, limits, strict=False))
        return len(shown) == len(found) and all(close)

    def _name_kind(self) -> list[str]:
        device = devices.of_model(self._model)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return [name, torch.backends.cpu.get_cpu_capability()]

    def _list_places(self) -> list[KeptPlace]:
        """What the user's code has, and buffers of the model that are not in its state."""
        beside = [
            KeptPlace(name := f"the model's buffer '{slot.name}' (outside of its state_dict())", slot.value,
                      lambda _: None, name)
            for slot in model_traits.buffer_slots(self._model, persistent=False)
            if slot.name not in self._moving and can_look(slot.value)
        ]  # fmt: skip
        return [*beside, *self._memory.list_places()]

    def _list_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, value) for name, value in self._model.named_parameters() if can_look(value))
        for slot in model_traits.buffer_slots(self._model, persistent=True):
            if can_look(slot.value):
                yield slot.name, slot.value

    def _hash_state(self) -> str:
        words = [f"{name} {describe(value)}" for name, value in self._list_state()]
        return hashlib.blake2b("\n".join(words).encode(), digest_size=16).hexdigest()

    @contextmanager
    def _make_up(self) -> Iterator[None]:
        """Gives the model's state values that follow from names and shapes alone, but for constants."""
        state = [value for _, value in self._list_state() if value.is_floating_point() and value.numel()]
        held = [value.detach().clone() for value in state]
        with torch.no_grad():
            for value in state:
                if value.numel() == 1 or bool((value != value.reshape(-1)[0]).any()):
                    wave = torch.arange(1, value.numel() + 1, device=value.device).double().mul_(1.7).sin_()
                    value.copy_(wave.view(value.shape) / math.sqrt(value.numel() // len(value) if value.dim() else 1))
        try:
            yield
        finally:
            with torch.no_grad():
                for value, was in zip(state, held, strict=True):
                    value.copy_(was)


def name_together(names: list[str]) -> str:
    """
    >>> name_together(["the loop's loss.teacher.0.weight", "the loop's loss.teacher.2.bias"]), name_together(["a.b"])
    ("the loop's loss.teacher", 'a.b')
    """
    end = next((at for at, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1), 0)
    return names[0][: max(names[0].rfind(".", 0, end), names[0].rfind("/", 0, end))] if end else names[0]


def describe(value: Any, until: float = math.inf) -> str:
    """A digest of a number, a tensor or an array; of a collection its length, of a long one that of its items, as far
    as the time `until` lets.

    >>> describe(3), describe([3, 4]), describe(torch.zeros(2)) == describe(torch.zeros(2))
    ('3', 'list 2', True)
    """
    if isinstance(value, torch.Tensor):
        return _hash(value.detach().reshape(-1), f"{value.dtype} {list(value.shape)}")
    if isinstance(value, np.ndarray):
        return _hash(torch.from_numpy(np.ascontiguousarray(value)).reshape(-1), f"{value.dtype} {list(value.shape)}")
    if isinstance(value, CollectionItems):
        return contents.digest(value, until)
    if type(value) in places.GROWING:
        return f"{type(value).__name__} {len(value)}"
    words = type(value).__name__ if places.is_iterator(value) else repr(value)
    return words if len(words) < SHORT else hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _hash(flat: torch.Tensor, kind: str) -> str:
    if flat.nbytes > WHOLE_BYTES:
        flat = flat[:: -(-flat.numel() // PARTS)]
    content: Any = flat.cpu().contiguous().view(torch.uint8).numpy()
    return f"{kind} {hashlib.blake2b(content, digest_size=8).hexdigest()}"


def wants_comparing(mine: dict[str, Any], first: dict[str, Any]) -> bool:
    """Whether there is something that a worker with `mine` has to compare with the first worker's."""
    return bool(first) and {**mine, "kind": ""} != {**first, "kind": ""}


def load_traits(shown: ModelTraits) -> ModelTraits | None:
    """`shown` with what another worker of this job has settled; None if there is nothing yet."""
    if "TRUELINE_CA" in os.environ:
        settled = settle_on_master(b"")
        return replace(shown, **json.loads(settled)) if settled else None
    try:
        return replace(shown, **json.loads(JobDir(Path(os.environ["TRUELINE_JOB"])).loss.read_bytes()))
    except (KeyError, FileNotFoundError):
        return None


def settle_traits(traits: ModelTraits) -> ModelTraits:
    """Settles `traits` for the job, unless another worker already has; returns what is settled."""
    settled = {name: value for name, value in asdict(traits).items() if name in _SETTLED}
    events.emit("loss.tried", **{name: value for name, value in settled.items() if name not in ("reads", "records")})
    if "TRUELINE_JOB" not in os.environ:
        return traits
    if "TRUELINE_CA" in os.environ:
        return replace(traits, **json.loads(settle_on_master(json.dumps(settled).encode())))
    write_when_room(JobDir(Path(os.environ["TRUELINE_JOB"])).loss, json.dumps(settled).encode(), replace=False)
    return load_traits(traits) or traits
