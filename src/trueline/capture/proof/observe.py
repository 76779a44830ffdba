"""What the eager model answers on probes, and what its answers show. The model is called here once for each probe."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch

from trueline.bundle.signature import DATATYPES, Array, Dim, Signature, TensorSpec
from trueline.capture.model import code_paths
from trueline.capture.model.allowance import CHEAP_S, Allowance
from trueline.capture.model.arbiter import Arbiter
from trueline.capture.model.code_paths import Event, SourceLine
from trueline.capture.model.eager import EagerSession, run_stored
from trueline.capture.model.stored import read_by_parts
from trueline.capture.proof import bounds, limits
from trueline.capture.proof.bounds import Measures
from trueline.capture.proof.careful import Unsafe, care
from trueline.capture.proof.probes import Probe
from trueline.errors import CaptureError
from trueline.runtime import compare
from trueline.runtime import distribution as draws
from trueline.runtime.compare import Bound
from trueline.runtime.session import Session

SEED = 0
BUDGET_S, LEAST, CHEAP_CALLS = 8.0, 2, 300
"""Seconds of second calls; of all float64 runs of a model, half as many for one that is not held in float64, and the
fewest probes; and how many of each are made where they are cheap."""
FIRST_S = 2.0
"""Of these, for the user's own probes, which tell the noise of others."""
ALONE_S = 4.0
"""Of float64 runs of a few records of a larger probe."""
DRAWS = 2
"""Runs in float64 with rounding, of each probe; one for a model that is not held in float64."""
SCALES = 4
"""Probes that are measured beyond that, each the first of its scale."""
MORE_DRAWS = 8
"""At most, for a probe on which a program would be refused: of a thousand numbers that are each the only one of their
column, two runs move some by nearly nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The eager model's answer on a probe, or why there is none, and the way its code took."""

    probe: Probe
    outputs: Mapping[str, Array] | None
    error: str
    way: Sequence[Event]
    draws: Mapping[str, Array] | None = None
    """Many answers, stacked, of a model that draws random numbers; `outputs` is the first."""
    unsafe: bool = False
    """Whether the model was stopped before an operator that would end the process, in a loop that does not end, or
    where memory ends: a program would do the same on these values, and nothing could stop it."""
    bounds: Mapping[str, Bound] | None = None
    """How far a program's float outputs may be off."""
    warm: Sequence[Event] | None = None
    """The way of a second call, in which caches are filled; None where it was not watched."""
    judged: bool = False
    """Whether the model answered in float64; else the bounds are of the scale of each column alone."""
    arbitrate: Callable[..., Observation] | None = None
    """Gives the same with the bounds that float64 tells (`every=True`: of all answers that were observed with it;
    `redraw=True`: by a draw more); None where `bounds` are these already, or there are none."""


def observation(name: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Observation:
    """An answer to values of the user, not watched."""
    records = max((len(array) for array in inputs.values() if array.ndim), default=1)
    probe = Probe(name=name, origin="given", num_records=records, inputs=inputs)
    return Observation(probe=probe, outputs=dict(outputs), error="", way=())


def observe(eager: Session, probes: Iterable[Probe], *, num_draws: int = 0) -> tuple[Observation, ...]:
    """Runs the eager model on each probe, watching which way its code goes. What it raises is recorded, not raised.
    The bounds are the least that any program gets; `arbitrate` widens them where one needs it.

    A model that draws random numbers runs `num_draws` times. Raises CaptureError, with the line, for one that returns
    other outputs on a probe than on its example: no program can.
    """
    seen: list[Observation] = []
    for probe in probes:
        one = observe_one(eager, probe, first=seen[0].way if seen else None)
        same = next((earlier.way for earlier in seen if earlier.way == one.way), None)
        one = one if same is None else replace(one, way=same)  # most go one way: keep it once
        if num_draws and one.outputs is not None:
            with care(probe), fixed_seed():
                one = replace(one, draws=draws.sample(eager, probe.inputs, num_draws))
        seen.append(one)
    return tuple(seen) if num_draws else with_least_bounds(eager, seen)


def watch_again(eager: Session, seen: Sequence[Observation]) -> tuple[Observation, ...]:
    """`seen` with the ways of second calls, as long as BUDGET_S lasts: where a table is made for a size, the first way
    parts from later ones, and no program follows it."""
    allowance, again = Allowance(BUDGET_S, CHEAP_CALLS), []
    for one in seen:
        if one.outputs is not None and allowance.allows():
            with allowance.charging():
                one = replace(one, warm=observe_one(eager, one.probe).way)
        again.append(one)
    return tuple(again)


@dataclass(slots=True, kw_only=True)
class _Known:
    """The answers of one model's arbiter: a program within the least bounds needs none."""

    arbiter: Arbiter | None
    measured: dict[str, Measures] = field(default_factory=dict)
    """By the digest of the inputs."""
    run: Allowance = field(default_factory=lambda: Allowance(BUDGET_S, CHEAP_CALLS))
    redrawn: Allowance = field(default_factory=lambda: Allowance(BUDGET_S, CHEAP_CALLS))
    alone: Allowance = field(default_factory=lambda: Allowance(ALONE_S, CHEAP_CALLS))
    """For the few records of larger answers."""
    again: tuple[str, dict[str, Array] | None, int] | None = None
    """The answer that is measured by more draws: its key, the model's answer in float64, and the last draw."""
    scales: int = 0
    """Answers that were measured without time for them, since none of their scale was."""
    per_run: float = 0.0
    """Seconds of one run of the last probe for each of its numbers."""

    def ask(self, seen: Observation, key: str, *, budget_s: float, plain: Measures | None = None) -> None:
        """Measures one answer, if there is time for it, or no other of the scale of `plain` was measured."""
        arbiter = self.arbiter
        if arbiter is None or seen.outputs is None or key in self.measured:
            return
        size = max(seen.probe.volume[1], 1)
        self.run.seconds, draws = (budget_s, DRAWS) if arbiter.small else (budget_s / 2, 1)
        if len(self.measured) >= LEAST and not self.run.allows(self.per_run * (draws + 1) * size):
            alone = plain is not None and not any(bounds.is_alike(plain, one) for one in self.measured.values())
            if not alone or self.scales >= SCALES:
                return
            self.scales += 1
        before = self.run.spent_s
        with self.run.charging():
            exact = [self._run(seen, draw) for draw in range(draws + 1)]
            answered = [one for one in exact if one is not None]
            if len(answered) == len(exact):
                self.measured[key] = bounds.measure(read_by_parts(seen.outputs), answered)
            elif not self.measured:
                self.arbiter = None
        self.per_run = (self.run.spent_s - before) / size / (draws + 1)

    def redraw(self, seen: Observation, key: str) -> None:
        """Measures one answer by one draw more, if there is time for it; without time it counts as not measured: what
        others tell of its noise is less of an accident than one draw."""
        if self.arbiter is None or seen.outputs is None:
            return
        if not self.redrawn.allows():
            if len(self.measured) > LEAST and seen.probe.origin != "given":
                self.measured.pop(key, None)
            return
        with self.redrawn.charging():
            if self.again is None or self.again[0] != key:
                self.again = key, self._run(seen, 0), DRAWS
            _, exact, drawn = self.again
            more = self._run(seen, drawn + 1)
            if exact is not None and more is not None:
                found = bounds.measure(read_by_parts(seen.outputs), [exact, more])
                self.measured[key] = bounds.merge(self.measured[key], found) if key in self.measured else found
            self.again = key, exact, drawn + 1

    def measure_records(self, seen: Observation, records: Sequence[int]) -> Measures | None:
        """What MORE_DRAWS runs of these records alone show, or as many as there is time for: rounding by itself, since
        among other records the model may answer otherwise. None without time for DRAWS of them, or where no dimension
        counts records."""
        if self.arbiter is None or seen.outputs is None or not self.alone.allows():
            return None
        count, chosen = seen.probe.num_records, list(records)
        if any(not array.ndim or len(array) != count for array in seen.outputs.values()):
            return None
        inputs = seen.probe.inputs
        few = {name: one[chosen] if one.ndim and len(one) == count else one for name, one in inputs.items()}
        run_s = self.per_run * sum(one.size for one in few.values())
        draws = min(MORE_DRAWS, int(self.alone.find_left() / run_s) - 1) if run_s > CHEAP_S else MORE_DRAWS
        if draws < DRAWS:
            return None
        with self.alone.charging():
            exact = [self._run(seen, draw, few) for draw in range(draws + 1)]
        answered = [one for one in exact if one is not None]
        if len(answered) < len(exact):
            return None
        plain = {name: one.astype(seen.outputs[name].dtype) for name, one in answered[0].items()}
        return bounds.measure(plain, answered)

    def _run(self, seen: Observation, draw: int, inputs: Mapping[str, Array] | None = None) -> dict[str, Array] | None:
        """None: an operator without a float64 kernel, a check of dtypes."""
        assert self.arbiter is not None
        try:
            with care(seen.probe):
                return self.arbiter.run(seen.probe.inputs if inputs is None else inputs, rounded=draw)
        except Exception:  # noqa: BLE001 - the user's forward in another dtype may raise anything
            return None


_KNOWN: WeakKeyDictionary[EagerSession, _Known] = WeakKeyDictionary()


def _make_arbiter(eager: EagerSession) -> Arbiter | None:
    """The model of `eager` in float64; None where it cannot be copied."""
    try:
        return Arbiter(eager)
    except Exception:  # noqa: BLE001 - the user's module may hold anything, a lock too, which has no copy
        return None


class _Arbitration:
    """The bounds of answers that were observed together."""

    def __init__(self, eager: Session, seen: Sequence[Observation]) -> None:
        self._eager, self._seen = eager, seen
        self._given = [one.probe.origin == "given" for one in seen]

    @cached_property
    def _plain(self) -> list[Measures]:
        return [bounds.measure(read_by_parts(one.outputs), ()) for one in self._seen]

    @cached_property
    def _keys(self) -> list[str]:
        return [digest(one.probe.inputs) for one in self._seen]

    def derive_least(self) -> list[Mapping[str, Bound]]:
        tables = bounds.make_tables(self._plain, self._given)
        return [{name: tables[name].derive_least(one) for name, one in found.items()} for found in self._plain]

    def judge(self, at: int, *, every: bool = False, redraw: bool = False, records: Sequence[int] = ()) -> Observation:
        """Answer number `at` with the bounds that float64 tells; `every`: of all answers, as far as there is time;
        `redraw`: of this one by a draw more; `records`: of these alone by many draws."""
        known = self._open()
        if known is not None:
            own = [i for i, given in enumerate(self._given) if given]
            for i in sorted(own, key=lambda i: self._seen[i].probe.volume):
                known.ask(self._seen[i], self._keys[i], budget_s=FIRST_S)
            known.ask(self._seen[at], self._keys[at], budget_s=BUDGET_S, plain=self._plain[at])
            for i in sorted(range(len(self._seen)), key=lambda i: self._seen[i].probe.volume) if every else ():
                known.ask(self._seen[i], self._keys[i], budget_s=BUDGET_S)
            if redraw:
                known.redraw(self._seen[at], self._keys[at])
        measured = known.measured if known is not None else {}
        here = [measured.get(key) or plain for key, plain in zip(self._keys, self._plain, strict=True)]
        others = [one for key, one in measured.items() if key not in self._keys]
        tables = bounds.make_tables([*here, *others], [*self._given, *(False for _ in others)])
        derived: dict[str, Bound] = {name: tables[name].derive(one, self._given[at]) for name, one in here[at].items()}
        part = known.measure_records(self._seen[at], records) if known is not None and records else None
        if part is not None:
            alone = bounds.make_tables([part], [False])
            for name, measured_alone in part.items():
                derived[name] = bounds.widen(derived[name], alone[name].derive(measured_alone, False), records)
        return replace(self._seen[at], bounds=derived, judged=bool(measured), arbitrate=None)

    def _open(self) -> _Known | None:
        if not isinstance(self._eager, EagerSession):
            return None
        if self._eager not in _KNOWN:
            _KNOWN[self._eager] = _Known(arbiter=_make_arbiter(self._eager))
        return _KNOWN[self._eager]


def with_least_bounds(eager: Session, seen: Sequence[Observation]) -> tuple[Observation, ...]:
    """`seen`, answers of `eager`, with the least bounds, and the way to wider ones."""
    group = _Arbitration(eager, seen)
    bounded = enumerate(zip(seen, group.derive_least(), strict=True))
    return tuple(replace(one, bounds=bound, arbitrate=partial(group.judge, at)) for at, (one, bound) in bounded)


def with_arbiter(eager: Session, seen: Observation) -> Observation:
    """`seen`, an answer of `eager`, without bounds: where the usual tolerance is not enough, float64 tells them."""
    return replace(seen, arbitrate=partial(_Arbitration(eager, [seen]).judge, 0))


def with_bounds(eager: Session, seen: Sequence[Observation]) -> tuple[Observation, ...]:
    """`seen`, answers of `eager`, with the bounds that float64 tells, as far as there is time."""
    group = _Arbitration(eager, seen)
    return tuple(group.judge(at, every=True) for at in range(len(seen)))


def observe_one(
    eager: Session, probe: Probe, *, first: Sequence[Event] | None = None, watched: bool = True
) -> Observation:
    """The model's answer on one probe, and its way, if it is `watched`; else the way is `first`."""
    unsafe = False
    with code_paths.watch(ends=True) if watched else nullcontext(first or ()) as way, care(probe), _bound_memory(probe):
        try:
            outputs, error = run_stored(eager, probe.inputs), ""
        except CaptureError as raised:
            place = code_paths.divergence(first, way) if first is not None else None
            where = f"; see {place}" if place else ""
            raise CaptureError(f"on probe '{probe.name}' {raised.message}{where}", hint=raised.hint) from raised
        except Exception as raised:  # noqa: BLE001 - the user's forward on made-up values may raise anything
            first_line = str(raised).splitlines()[0] if str(raised) else ""
            outputs, error = None, f"raises {type(raised).__name__}: {first_line}"
            unsafe = isinstance(raised, Unsafe | code_paths.Endless) or limits.is_lack_of_memory(raised)
    return Observation(probe=probe, outputs=outputs, error=error, way=way, unsafe=unsafe)


def _bound_memory(probe: Probe) -> AbstractContextManager[object]:
    """A planted number may be a count: `bincount` of 2^31 would take all memory of the machine."""
    counts = bool(probe.planted) and probe.inputs[probe.planted].dtype.kind in "iu"
    return limits.bounded_memory(limits.MEMORY_BYTES[-1]) if counts else nullcontext()


def hidden_state(observations: Sequence[Observation]) -> str:
    """How the eager model's answers to equal inputs differ; empty when no probe shows that they do, or it draws random
    numbers, as it may: then they do differ."""
    if any(seen.draws is not None for seen in observations):
        return ""
    answers: dict[str, Observation] = {}
    for seen in observations if len(observations) > 1 else ():
        earlier = answers.setdefault(digest(seen.probe.inputs), seen)
        if earlier is seen or earlier.outputs is None or seen.outputs is None:
            continue
        comparison = compare.compare(read_by_parts(earlier.outputs), seen.outputs)
        if not comparison.agrees:
            return comparison.reason
    return ""


@contextmanager
def fixed_seed() -> Iterator[None]:
    """torch draws the same numbers on the CPU in each such block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def digest(inputs: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(inputs.items()):
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def find_parting(observations: Sequence[Observation], disagreeing: str = "") -> tuple[SourceLine, str, str] | None:
    """The line where two probes part, with the names of the two; None when all took the same way. The probe that
    disagrees is compared with one of the same sizes, if there is one: then the values steer the branch, not the
    shape."""
    suspects = [seen for seen in observations if seen.probe.name == disagreeing] or observations[:1]
    for suspect in suspects:
        shapes = [one.shape for one in suspect.probe.inputs.values()]
        ranked = sorted(observations, key=lambda seen: [one.shape for one in seen.probe.inputs.values()] != shapes)
        for other in ranked:
            if other.outputs is None:
                continue  # an exception cut its way short
            place = code_paths.divergence(other.warm or other.way, suspect.warm or suspect.way)
            if place is not None:
                return place, other.probe.name, suspect.probe.name
    return None


Seen = Sequence[tuple[Mapping[str, int], tuple[int, ...]]]
"""For each probe the sizes of the input symbols, and the shape of one output."""


def seen_signature(inputs: Signature, observations: Sequence[Observation]) -> Signature:
    """`inputs` with the outputs as the probes showed them, for programs whose exporter does not derive their sizes.

    A size is a number when it never changed, the symbol of an input when it always had that symbol's size, and else a
    symbol of its own without a bound. Raises CaptureError when an output has no one form.
    """
    answered = [(seen.probe.inputs, seen.outputs) for seen in observations if seen.outputs is not None]
    if not answered:
        why = next((seen.error for seen in observations), "there is no probe")
        raise CaptureError(f"the model answers no probe: {why}")
    states = {spec.name for spec in inputs.outputs if spec.role == "state"}
    dims, outputs = dict(inputs.dims), []
    for name, first in answered[0][1].items():
        shapes = [(inputs.sizes(given), answer[name].shape) for given, answer in answered if name in answer]
        if len(shapes) != len(answered) or len({len(shape) for _, shape in shapes}) != 1:
            raise CaptureError(
                f"output '{name}' is not always there, or not always of {first.ndim} dimensions",
                hint="a bundle has the same outputs for every request",
            )
        role: Literal["data", "state"] = "state" if name in states else "data"
        outputs.append(msgspec.structs.replace(_spec(name, first, shapes, dims), role=role))
    return Signature(inputs=inputs.inputs, outputs=tuple(outputs), dims=dims, guards=inputs.guards)


def _spec(name: str, first: Array, shapes: Seen, dims: dict[str, Dim]) -> TensorSpec:
    shape: list[int | str] = []
    for axis, size in enumerate(first.shape):
        sizes = [(symbols, other[axis]) for symbols, other in shapes]
        same = next((symbol for symbol in sizes[0][0] if all(at[symbol] == other for at, other in sizes)), None)
        if all(other == size for _, other in sizes) and len(sizes) > 1:
            shape.append(size)
        elif same is not None:
            shape.append(same)
        else:
            dims[f"{name}.{axis}"] = Dim(min=0)
            shape.append(f"{name}.{axis}")
    return TensorSpec(name=name, datatype=DATATYPES[first.dtype], shape=tuple(shape))
