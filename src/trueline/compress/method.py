"""What a search may do to a program, and what it has to keep: descriptions only. Pure.

static:u8s8,percentile        a CompressMethod: its kind, and the words that say which variant
accuracy=1%                   a Budget: a metric, and how much of it may be lost
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trueline.errors import UsageError, closest, join_names

Target = Literal["latency", "size", "memory"]
TARGETS: tuple[Target, ...] = get_args(Target)
BY_DEFAULT = "accuracy=1%"
"""The budget of a search for which none was named."""
MINUTES = 15.0
"""After which a search tries no further candidate."""
CONFIDENCE = 0.95
"""Of the one-sided bound of what is lost."""
_SMALLER_IS_BETTER = ("loss", "error", "mae", "mse", "rmse", "mape", "perplexity", "nll", "wer", "cer")
"""Words in the names of metrics of which less is better."""
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)")
UNCHANGED = "unchanged"
"""Kind of the method that quantizes nothing: of a derived model's program as it is."""
VARIANTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "dynamic": (("u8", "s8"),),
    "static": (("u8s8", "s8s8"), ("minmax", "percentile", "entropy", "mse")),
    "openvino": (("mixed", "performance"),),
    "openvino-fp32": (),
    "float16": (),
    "bfloat16": (),
    "weights": (("int8", "int4"),),
    "inductor": (("static", "dynamic"),),
}
"""Kind of a method: groups of words, of which a method has one each. The first word is the usual one."""


BY_HAND = ("inductor",)
"""Kinds that a search tries only if a user names them: machine code, which a server runs by consent alone."""
ProgramFormat = Literal["onnx", "openvino", "aotinductor"]


def format_of(kind: str) -> ProgramFormat:
    """The format of the program that a method of `kind` makes: which runtime proves, times and serves it."""
    if kind == "inductor":
        return "aotinductor"
    return "openvino" if kind.startswith("openvino") else "onnx"


def file_of(format: str) -> str:
    """The name of a program's file."""
    return "model.so.pt2" if format == "aotinductor" else "model.onnx"


@dataclass(frozen=True, slots=True)
class CompressMethod:
    """One way to compress a program. `exclude`: names of operators that stay as they are; `base`: the derived model
    whose program it is, empty for the parent's; `trial`: the number of a choice of the Bayesian search."""

    kind: str
    words: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    base: str = ""
    trial: int = 0

    @property
    def format(self) -> ProgramFormat:
        return format_of(self.kind)

    @property
    def name(self) -> str:
        """As it is typed, and how many operators are left out.

        >>> CompressMethod("static", ("u8s8", "entropy"), ("conv1", "fc")).name
        'static:u8s8,entropy without 2'
        """
        words = ":" + ",".join(self.words) if self.words else ""
        trial = f" (choice {self.trial})" if self.trial else ""
        own = f"{self.kind}{words}" + (f" without {len(self.exclude)}{trial}" if self.exclude else "")
        return " + ".join([self.base] * bool(self.base) + [own] * (self.kind != UNCHANGED))


def parse_method(text: str) -> CompressMethod:
    """The method in `text`; words that it leaves out are the usual ones. Raises UsageError.

    >>> parse_method("static:entropy").name, parse_method("dynamic").name
    ('static:u8s8,entropy', 'dynamic:u8')
    """
    kind, _, rest = text.partition(":")
    if kind not in VARIANTS:
        near = closest(kind, VARIANTS)
        raise UsageError(
            f"there is no way to quantize called '{kind}' (there are: {join_names(VARIANTS)})",
            hint=f"did you mean '{near}'?" if near else "",
        )
    given, groups = [word for word in rest.split(",") if word], VARIANTS[kind]
    known = [word for group in groups for word in group]
    for word in given:
        if word not in known:
            near = closest(word, known)
            raise UsageError(
                f"'{kind}' has no variant '{word}' (has: {join_names(known)})",
                hint=f"did you mean '{near}'?" if near else "",
            )
    chosen = []
    for group in groups:
        named = [word for word in given if word in group]
        if len(named) > 1:
            raise UsageError(f"'{text}' names {join_names(named)}, of which a program can have one")
        chosen.append(named[0] if named else group[0])
    return CompressMethod(kind, tuple(chosen))


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of `metric` may be lost, in the metric's own unit."""

    metric: str
    amount: float

    @property
    def larger_is_better(self) -> bool:
        """By the metric's name.

        >>> Budget("accuracy", 0.01).larger_is_better, Budget("val_loss", 0.1).larger_is_better
        (True, False)
        """
        words = re.split(r"[^a-z]+", self.metric.lower())
        return not any(word in _SMALLER_IS_BETTER for word in words)

    @property
    def text(self) -> str:
        return f"{self.metric}={self.amount:g}"


def parse_budget(text: str) -> Budget:
    """`accuracy=1%` is a loss of at most 0.01; without the % the number is in the metric's unit. Raises UsageError.

    >>> parse_budget("accuracy=0.5%"), parse_budget("mae=2")
    (Budget(metric='accuracy', amount=0.005), Budget(metric='mae', amount=2.0))
    """
    metric, separator, amount = text.partition("=")
    match = _AMOUNT.fullmatch(amount.strip())
    if not separator or not metric or match is None or float(match[1]) == 0:
        raise UsageError(
            f"budget is '{text}', expected METRIC=AMOUNT with an amount above 0",
            hint="accuracy=1% allows the metric 'accuracy' to lose 0.01",
        )
    return Budget(metric.strip(), float(match[1]) / (100 if match[2] else 1))


def check_metric(budget: Budget, known: Sequence[str]) -> None:
    """Raises UsageError unless the recipe has the metric of `budget`."""
    if budget.metric not in known:
        near = closest(budget.metric, known)
        raise UsageError(
            f"the budget names the metric '{budget.metric}', and the recipe has none of that name "
            f"(has: {join_names(known)})",
            hint=f"did you mean '{near}'?" if near else "add it to the recipe's metrics(), one value for each record",
        )
