"""Composes small models from idioms: the sources of runnable recipe files, from a seed.

An idiom is some statements that turn `h` into another `h` (`idioms/*.txt`). Its head says from what to what:

    R  a batch of records   (batch, 6)             D  identifiers `ids`  (batch, length), below 20
    S  sequences            (batch, length, 6)     P  records and `pick` (batch), below 6
    I  images               (batch, 2, height, width)
    M  sequences and `mask`    N  sequences and `lengths`    K  sequences and `past` (batch, past, 6)

and what it is: `issueN`, the class it belongs to; `impure`, a model that is no function of its inputs. `top:` lines
belong to the module, `init:` lines to the constructor; `$` makes names unique.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SHAPES = {"R": "R", "S": "S", "I": "I", "D": "", "P": "R", "M": "S", "N": "S", "K": "S"}
"""What an idiom starts from -> the form that `h` has there."""
NEEDS = {"D": "ids", "P": "pick", "M": "mask", "N": "lengths", "K": "past"}
FIELDS = {
    "R": "real batch 6",
    "S": "real batch length 6",
    "I": "real batch 2 height width",
    "ids": "ids:20 batch length",
    "pick": "ids:6 batch",
    "mask": "mask batch length",
    "lengths": "lengths:length batch",
    "past": "real batch past 6",
}
SIZES = (
    {"batch": (3, 4), "length": (5, 8), "height": (6, 8), "width": (7, 9), "past": (4, 6)},
    {"batch": (2, 5, 3), "length": (12, 7, 9), "height": (8, 10, 8), "width": (8, 12, 6), "past": (5, 5, 9)},
    {"batch": (5, 1), "length": (6, 10), "height": (9, 9), "width": (6, 11), "past": (3, 8)},
    {"batch": (4, 36), "length": (8, 20), "height": (8, 8), "width": (10, 14), "past": (6, 20)},
    {"batch": (3, 3), "length": (3, 16), "height": (5, 8), "width": (5, 7), "past": (2, 7)},
)
"""Sizes of a user's examples, one of which is chosen for a model."""
FORMS = ("plain", "plain", "plain", "names", "nested")
"""How forward is called: with tensors, with keywords, or with a dict."""
ENDS = {
    "tensor": "return h",
    "tuple": "return h, h.abs().sum(-1)",
    "dict": 'return {"h": h, "mean": h.mean(-1)}',
    "list": "return [h, (h > 0)]",
}
HEAD = """\
import collections
import copy
import itertools
import math
import random

import torch
import torch.nn.functional as F
from torch import nn
"""
TAIL = """\
def model():
    torch.manual_seed(0)
    return Model().eval()


def examples():
    return inputs_of(INPUTS, EXAMPLES)


def loss(outputs, labels):
    raise NotImplementedError


def optimizer(params):
    raise NotImplementedError


def dataset(mode):
    raise NotImplementedError
"""
DRAW = '''\
def inputs_of(fields, sizes):
    """Batches of the given sizes, as forward is called."""
    g = torch.Generator().manual_seed(1)
    for at in sizes:
        batch = {}
        for name, field in fields.items():
            kind, *axes = field.split()
            shape = [at.get(a) or int(a) for a in axes]
            kind, _, below = kind.partition(":")
            if kind == "real":
                batch[name] = torch.randn(shape, generator=g)
            elif kind == "mask":
                shown = 1 + torch.arange(shape[0]) % shape[1] + shape[1] // 2
                batch[name] = torch.arange(shape[1])[None] < shown[:, None]
            else:
                top = at[below] + 1 if kind == "lengths" else int(below)
                batch[name] = torch.randint(int(kind == "lengths"), top, shape, generator=g)
                if kind == "lengths":
                    batch[name][0] = at[below]
        yield as_called(batch)
'''
CALLED = {
    "plain": "values = tuple(batch.values())\n    return values if len(values) > 1 else values[0]",
    "names": "return batch",
    "nested": "return (batch,)",
}


@dataclass(frozen=True)
class Idiom:
    name: str
    start: str
    end: str
    tags: frozenset[str]
    top: tuple[str, ...]
    init: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def issue(self) -> str:
        """The class of issue 22 that it belongs to; empty for everyday code."""
        return next((tag for tag in sorted(self.tags) if tag.startswith("issue")), "")


@dataclass(frozen=True)
class Sketch:
    """A model before it is written: idioms in order, and how it is called."""

    first: str
    """The form that `h` begins with: R, S, I or D."""
    idioms: tuple[Idiom, ...]
    sizes: int = 0
    form: str = "plain"
    end: str = "tensor"

    @property
    def name(self) -> str:
        return "-".join(idiom.name for idiom in self.idioms)

    @property
    def impure(self) -> bool:
        return any("impure" in idiom.tags for idiom in self.idioms)

    @property
    def fields(self) -> dict[str, str]:
        found = {} if self.first == "D" else {"x": FIELDS[self.first]}
        for idiom in self.idioms:
            if idiom.start in NEEDS:
                found[NEEDS[idiom.start]] = FIELDS[NEEDS[idiom.start]]
        return found

    def simpler(self) -> Iterator[Sketch]:
        """Smaller models that may be wrong in the same way, the smallest first."""
        for count in range(1, len(self.idioms)):
            for at in range(len(self.idioms) - count + 1):
                part = self.idioms[at : at + count]
                if fits(part):
                    yield Sketch(SHAPES[part[0].start] or "D", part, self.sizes)
                    if self.end != "tensor":
                        yield Sketch(SHAPES[part[0].start] or "D", part, self.sizes, end=self.end)
        if self.form != "plain" or self.end != "tensor":
            yield replace(self, form="plain", end="tensor")
            yield replace(self, form="plain")
            yield replace(self, end="tensor")


def fits(idioms: Sequence[Idiom]) -> bool:
    """Whether each idiom starts from the form that the one before it leaves."""
    return all(SHAPES[b.start] == a.end for a, b in itertools.pairwise(idioms))


def idioms() -> list[Idiom]:
    """All of them, in the order of the files. Raises ValueError for a head that is no head."""
    found = []
    for file in sorted((Path(__file__).parent / "idioms").glob("*.txt")):
        for part in file.read_text().split("\n\n"):
            lines = [line for line in part.strip("\n").splitlines() if not line.startswith("#")]
            if not lines:
                continue
            name, way, *tags = lines[0].strip("[]").split()
            start, _, end = way.partition(">")
            if start not in SHAPES or end not in "RSI":
                raise ValueError(f"{file.name}: {lines[0]}")
            kinds: dict[str, list[str]] = {"top": [], "init": [], "": []}
            for line in lines[1:]:
                kind, _, rest = line.partition(": ")
                if kind in ("top", "init"):
                    kinds[kind].append(rest)
                else:
                    kinds[""].append(line)
            found.append(
                Idiom(name, start, end, frozenset(tags), *(tuple(kinds[kind]) for kind in ("top", "init", "")))
            )
    return found


def sketches(seed: int) -> Iterator[Sketch]:
    """Without end. Half of the models are led by everyday code, the others by the classes of issue 22 in turn; each
    idiom of a class leads one, alone or among others, before an idiom of its class leads a second."""
    known, draw = idioms(), random.Random(seed)
    classes: dict[str, list[Idiom]] = {}
    for idiom in known:
        classes.setdefault(idiom.issue, []).append(idiom)
    leads = {name: _again_and_again(draw, members) for name, members in classes.items()}
    named = sorted(name for name in classes if name)
    while True:
        for name in draw.sample(named, len(named)):
            for lead in (next(leads[name]), next(leads[""])):
                yield compose(draw, known, lead, most=1 if draw.random() < 0.3 else 3)


def _again_and_again(draw: random.Random, members: Sequence[Idiom]) -> Iterator[Idiom]:
    while True:
        yield from draw.sample(members, len(members))


def compose(draw: random.Random, known: Sequence[Idiom], lead: Idiom, most: int) -> Sketch:
    """A model with `lead` and up to `most` - 1 idioms around it. At most one of them has a state."""
    parts = [lead]
    impure = "impure" in lead.tags
    for _ in range(draw.randint(0, most - 1)):
        before = draw.random() < 0.4 and parts[0].start != "D"
        want = SHAPES[parts[0].start] if before else parts[-1].end
        fitting = [
            one
            for one in known
            if one not in parts
            and not ("impure" in one.tags and (impure or draw.random() < 0.7))
            and (one.end == want if before else SHAPES[one.start] == want)
        ]
        new = draw.choice(fitting)
        impure = impure or "impure" in new.tags
        parts = [new, *parts] if before else [*parts, new]
    return Sketch(
        first=SHAPES[parts[0].start] or "D",
        idioms=tuple(parts),
        sizes=draw.randrange(len(SIZES)),
        form=draw.choice(FORMS),
        end=draw.choice(["tensor", "tensor", *ENDS]),
    )


def source(sketch: Sketch, comment: str = "") -> str:
    """The text of a recipe file with the model; its `examples()` are the user's."""
    fields = sketch.fields
    top: list[str] = []
    init: list[str] = []
    lines: list[str] = [] if sketch.first == "D" else ["h = x"]
    if sketch.form == "nested":
        lines = [f'{name} = data["{name}"]' for name in fields] + lines
    for at, idiom in enumerate(sketch.idioms):
        for into, text in ((top, idiom.top), (init, idiom.init), (lines, idiom.lines)):
            into += [line.replace("$", str(at)) for line in text]
    lines.append(ENDS[sketch.end])
    taken = "data" if sketch.form == "nested" else ", ".join(fields)
    named = SIZES[sketch.sizes]
    symbols = [name for name in named if any(name in field.split() for field in fields.values())]
    examples = [dict(zip(symbols, sizes, strict=True)) for sizes in zip(*(named[s] for s in symbols), strict=True)]
    body = [
        *([f'"""{comment}"""', ""] if comment else []),
        HEAD,
        f"INPUTS = {fields!r}",
        f"EXAMPLES = {examples!r}",
        *(["", *top] if top else []),
        "",
        "",
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in init),
        "",
        f"    def forward(self, {taken}):",
        *(f"        {line}" for line in lines),
        "",
        "",
        f"def as_called(batch):\n    {CALLED[sketch.form]}",
        "",
        "",
        DRAW,
        "",
        TAIL,
    ]
    return "\n".join(body)
