"""The declarations of columns, as a recipe writes them.

Number     float32, together with all other Numbers the input `numbers` [n, numbers]
Category   int64 [n]            0: no value, 1: a value that the training records do not have, 2...: its values
Text       int64 [n, length]    0: padding, 1: an unknown word, 2...: words; with a mask bool [n, length]
Image      float32 [n, channels, height, width]
Series     float32 [n, length]          numbers of unequal length, filled up with `pad`; with a mask bool [n, length]
Label      int64 [n] of classes, or float32 [n]
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from trueline.errors import RecipeError

Scale = Literal["standard", "minmax", "none"]
MAX_LENGTH, MAX_SIDE = 1 << 20, 1 << 14
NUMBERS = "numbers"
"""The model's input that holds all Numbers."""
MASK = "_mask"


class Number(msgspec.Struct, frozen=True, kw_only=True, tag="number", tag_field="kind", forbid_unknown_fields=True):
    """A number, scaled to mean 0 and deviation 1 (`scale="standard"`), to [0, 1] ("minmax"), or as it is ("none").

    `missing` stands in the place of values that are missing: "mean" or "median" of the training records, a number, or
    "error". With `indicator` a second number is 1 where the value was missing, else 0.
    """

    scale: Scale = "standard"
    missing: Literal["error", "mean", "median"] | float = "error"
    indicator: bool = False

    def faults(self) -> Iterator[str]:
        if self.scale not in ("standard", "minmax", "none"):
            yield f"scale={self.scale!r}, expected 'standard', 'minmax' or 'none'"
        if isinstance(self.missing, str):
            if self.missing not in ("error", "mean", "median"):
                yield f"missing={self.missing!r}, expected 'error', 'mean', 'median' or a number"
        elif isinstance(self.missing, bool) or not math.isfinite(self.missing):
            yield f"missing={self.missing!r}, expected a finite number"


class Category(msgspec.Struct, frozen=True, kw_only=True, tag="category", tag_field="kind", forbid_unknown_fields=True):
    """One of a set of values: text, whole numbers or booleans.

    Index 0 is for no value (a null, an empty cell), 1 for values that the training records do not have. Values that
    occur fewer than `rare` times get index 1 too, which so is trained. `values` gives the set instead of the records.
    """

    rare: int = 1
    missing: Literal["own", "error"] = "own"
    values: tuple[str, ...] | None = None

    def faults(self) -> Iterator[str]:
        if not _is_count(self.rare):
            yield f"rare={self.rare!r}, expected a whole number of at least 1"
        if self.missing not in ("own", "error"):
            yield f"missing={self.missing!r}, expected 'own' (an index of its own) or 'error'"
        if self.values is not None and (not self.values or len(set(self.values)) < len(self.values)):
            yield "values is empty or has a value twice"


class Text(msgspec.Struct, frozen=True, kw_only=True, tag="text", tag_field="kind", forbid_unknown_fields=True):
    """A text as indices of its words (`unit="words"`, each sign of punctuation is one) or characters.

    Texts are cut at `max_length` and filled up with 0. `vocabulary` is the largest number of words: the most frequent
    of those that occur at least `min_count` times. With `mask` the model gets NAME_mask, true where a word is. An
    empty text is no error; a missing one is read as empty unless `missing="error"`.
    """

    max_length: int
    unit: Literal["words", "characters"] = "words"
    vocabulary: int = 20_000
    min_count: int = 1
    lower: bool = True
    mask: bool = True
    missing: Literal["empty", "error"] = "empty"

    def faults(self) -> Iterator[str]:
        if not _is_count(self.max_length) or self.max_length > MAX_LENGTH:
            yield f"max_length={self.max_length!r}, expected 1 to {MAX_LENGTH}"
        if self.unit not in ("words", "characters"):
            yield f"unit={self.unit!r}, expected 'words' or 'characters'"
        if self.missing not in ("empty", "error"):
            yield f"missing={self.missing!r}, expected 'empty' or 'error'"
        if not _is_count(self.vocabulary) or not _is_count(self.min_count):
            yield "vocabulary and min_count are whole numbers of at least 1"


class Image(msgspec.Struct, frozen=True, kw_only=True, tag="image", tag_field="kind", forbid_unknown_fields=True):
    """An encoded image (PNG, JPEG, ...), resized to `size` (a side, or height and width), in [0, 1].

    With `mean` and `std`, one number for each channel, (value - mean) / std. Requests send base64.
    """

    size: int | tuple[int, int]
    channels: Literal[1, 3] = 3
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def height_width(self) -> tuple[int, int]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def faults(self) -> Iterator[str]:
        sides = self.size if isinstance(self.size, tuple) else (self.size,)
        if len(sides) not in (1, 2) or not all(_is_count(side) and side <= MAX_SIDE for side in sides):
            yield f"size={self.size!r}, expected a number of pixels or (height, width)"
        if self.channels not in (1, 3):
            yield f"channels={self.channels!r}, expected 1 (grey) or 3 (RGB)"
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != self.channels:
                yield f"{name} has {len(values)} numbers, and the image {self.channels} channels"
        if self.std is not None and not all(value > 0 for value in self.std):
            yield f"std={self.std!r}, expected numbers above 0"


class Series(msgspec.Struct, frozen=True, kw_only=True, tag="series", tag_field="kind", forbid_unknown_fields=True):
    """A list of numbers, of another length in each record: a list of Parquet or JSON, or a text as CSV holds it, such
    as `[1.5, 2, 3]` or `1.5 2 3`.

    Numbers are scaled as those of `Number`, over all lists. Lists are cut at `max_length` and filled up with `pad`,
    a number as the model sees it. With `mask` the model gets NAME_mask, true where a number is. An empty list is no
    error. A list that is missing, and a gap inside of one, are padding, unless `missing="error"`.
    """

    max_length: int
    scale: Scale = "standard"
    pad: float = 0.0
    mask: bool = True
    missing: Literal["empty", "error"] = "empty"

    def faults(self) -> Iterator[str]:
        if not _is_count(self.max_length) or self.max_length > MAX_LENGTH:
            yield f"max_length={self.max_length!r}, expected 1 to {MAX_LENGTH}"
        if self.scale not in ("standard", "minmax", "none"):
            yield f"scale={self.scale!r}, expected 'standard', 'minmax' or 'none'"
        if isinstance(self.pad, bool) or not isinstance(self.pad, int | float) or not math.isfinite(self.pad):
            yield f"pad={self.pad!r}, expected a finite number"
        if self.missing not in ("empty", "error"):
            yield f"missing={self.missing!r}, expected 'empty' or 'error'"


class Label(msgspec.Struct, frozen=True, kw_only=True, tag="label", tag_field="kind", forbid_unknown_fields=True):
    """The answer to learn: classes by index, in sorted order; or, with `number`, a number, scaled as `scale` says.

    The model's output is declared by `outputs`: "logits" or "probabilities" [n, classes] (one column, or none, for two
    classes), so that answers name the class and its probability. Numbers are scaled back in answers.
    """

    number: bool = False
    scale: Scale = "none"
    outputs: Literal["logits", "probabilities"] = "logits"
    classes: tuple[str, ...] | None = None

    def faults(self) -> Iterator[str]:
        if self.scale not in ("standard", "minmax", "none"):
            yield f"scale={self.scale!r}, expected 'standard', 'minmax' or 'none'"
        elif self.scale != "none" and not self.number:
            yield f"scale={self.scale!r} is for numbers: Label(number=True, scale={self.scale!r})"
        if self.outputs not in ("logits", "probabilities"):
            yield f"outputs={self.outputs!r}, expected 'logits' or 'probabilities'"
        if self.classes is not None and (self.number or len(set(self.classes)) < max(2, len(self.classes))):
            yield "classes are two or more different names, of a label that is no number"


Declared: TypeAlias = Number | Category | Text | Image | Series | Label
KINDS: tuple[type[Any], ...] = (Number, Category, Text, Image, Series, Label)


EXPECTED = "Number(), Category(), Text(), Image(), Series() or Label()"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def input_name(column: str) -> str:
    """The keyword argument of a model for `column`.

    >>> input_name("hours-per-week"), input_name("class"), input_name("2nd")
    ('hours_per_week', 'class_', '_2nd')
    """
    name = re.sub(r"\W", "_", column) or "_"
    name = f"_{name}" if name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) else name


def input_names(declared: Mapping[str, Declared]) -> list[str]:
    """The model's keyword arguments, in order: `numbers` first, then each other column, its mask behind it."""
    names = [NUMBERS] if any(isinstance(one, Number) for one in declared.values()) else []
    for column, one in declared.items():
        if isinstance(one, Category | Text | Image | Series):
            names.append(input_name(column))
        if isinstance(one, Text | Series) and one.mask:
            names.append(input_name(column) + MASK)
    return names


def find_faults(value: object) -> Iterator[str]:
    """What is wrong with a recipe's `columns`, a line each."""
    example = 'columns = {"age": Number(missing="mean"), "city": Category(), "income": Label()}'
    if not isinstance(value, Mapping) or not value:
        yield f"columns is {type(value).__name__}, expected {{column: declaration}}, e.g. {example}"
        return
    for name, one in value.items():
        if not isinstance(name, str) or not isinstance(one, KINDS):
            called = " (it needs brackets)" if one in KINDS else ""
            yield f"columns[{name!r}] is {one!r}{called}, expected {EXPECTED}"
        else:
            yield from (f"columns[{name!r}]: {fault}" for fault in one.faults())
    sound = {name: one for name, one in value.items() if isinstance(name, str) and isinstance(one, KINDS)}
    names = input_names(sound)
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two columns would be the model's input '{name}'; rename one in the records"
    if sound and not names:
        yield "columns declares labels and nothing to learn from"


def check(value: Mapping[str, Declared]) -> None:
    """Raises RecipeError for a declaration that `find_faults` objects to."""
    faults = list(find_faults(value))
    if faults:
        raise RecipeError("; ".join(faults))
