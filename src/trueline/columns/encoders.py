"""One fitted column of each kind: what the declaration and the training records give together, and its encoding."""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from trueline.columns import cells
from trueline.columns.cells import ValueKind
from trueline.columns.declared import Category, Image, Label, Number, Series, Text
from trueline.columns.series import Lists, lists_of_array, lists_of_cells
from trueline.errors import DataError, MissingValues, join_names

Array = npt.NDArray[Any]
MISSING, UNSEEN, FIRST = 0, 1, 2
"""Indices of a category: no value, a value that training did not have, the first of its values."""
PAD, UNKNOWN = 0, 1
MAX_PIXELS = 64 * 2**20
"""Larger images are refused before they are decoded."""
_WORD = re.compile(r"\w+|[^\w\s]")


class _Fitted(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True, dict=True):
    name: str
    type: ValueKind
    """What the records hold."""
    missing: int = 0
    """Training records without a value."""

    def refuse_missing(self, absent: Array) -> None:
        """Raises MissingValues if any of `absent` is true."""
        if absent.any():
            raise MissingValues(
                f"column '{self.name}' has no value in {int(absent.sum())} of {len(absent)} records, first in record "
                f"{int(np.flatnonzero(absent)[0])}",
                hint="send a value, or declare in the recipe what stands in its place (missing=...)",
            )


class FittedNumber(_Fitted, frozen=True, tag="number"):
    declared: Number
    offset: float
    factor: float
    """The model gets (value - offset) / factor."""
    fill: float | None
    """What stands in the place of a missing value, unscaled; None: an error."""
    low: float
    high: float

    @property
    def width(self) -> int:
        """Columns of `numbers`."""
        return 2 if self.declared.indicator else 1

    def encode_values(self, values: cells.Floats) -> list[Array]:
        """[n] float64 with NaN for missing -> float32 [n], and the indicator. Raises MissingValues."""
        absent = np.isnan(values)
        if self.fill is None:
            self.refuse_missing(absent)
            filled = values
        else:
            filled = np.where(absent, self.fill, values)
        with np.errstate(over="ignore"):
            scaled = ((filled - self.offset) / self.factor).astype(np.float32)
        if not np.isfinite(scaled).all():
            row = int(np.flatnonzero(~np.isfinite(scaled))[0])
            raise DataError(
                f"column '{self.name}' of record {row}: {filled[row]!r} is a number that float32 cannot hold"
            )
        return [scaled, absent.astype(np.float32)] if self.declared.indicator else [scaled]


class FittedCategory(_Fitted, frozen=True, tag="category"):
    declared: Category
    values: tuple[str, ...]
    """In order of their index, which begins at FIRST."""

    @property
    def size(self) -> int:
        """The number of indices, as an embedding needs it."""
        return len(self.values) + FIRST

    @cached_property
    def indices(self) -> dict[str, int]:
        return {value: at for at, value in enumerate(self.values, FIRST)}

    def index(self, key: str | None) -> int:
        return MISSING if key is None else self.indices.get(key, UNSEEN)

    def encode_keys(self, keys: Iterable[str | None]) -> Array:
        found = np.fromiter((self.index(key) for key in keys), np.int64)
        self.check(found)
        return found

    def check(self, found: Array) -> None:
        if self.declared.missing == "error":
            self.refuse_missing(found == MISSING)


class FittedText(_Fitted, frozen=True, tag="text"):
    declared: Text
    words: tuple[str, ...]
    """In order of their index, which begins at FIRST."""
    cut: int = 0
    """Training records whose text is longer than `max_length`."""

    @property
    def size(self) -> int:
        """The number of indices, as an embedding needs it."""
        return len(self.words) + FIRST

    @property
    def length(self) -> int:
        return self.declared.max_length

    @cached_property
    def indices(self) -> dict[str, int]:
        return {word: at for at, word in enumerate(self.words, FIRST)}

    def encode_texts(self, texts: Sequence[str | None]) -> tuple[Array, Array]:
        """Indices int64 [n, length], and the mask bool [n, length]. Raises MissingValues."""
        if self.declared.missing == "error":
            self.refuse_missing(np.array([text is None for text in texts], bool))
        ids = np.full((len(texts), self.length), PAD, np.int64)
        lengths = np.zeros(len(texts), np.int64)
        known = self.indices
        for row, text in enumerate(texts):
            words = split_text(text or "", self.declared)[: self.length]
            ids[row, : len(words)] = [known.get(word, UNKNOWN) for word in words]
            lengths[row] = len(words)
        return ids, np.arange(self.length) < lengths[:, None]


class FittedImage(_Fitted, frozen=True, tag="image"):
    declared: Image

    def encode_images(self, contents: Sequence[bytes | None]) -> Array:
        """float32 [n, channels, height, width]. Raises DataError."""
        self.refuse_missing(np.array([content is None for content in contents], bool))
        height, width = self.declared.height_width
        found = np.empty((len(contents), self.declared.channels, height, width), np.float32)
        for row, content in enumerate(contents):
            found[row] = decode_image(content or b"", self.declared, f"column '{self.name}' of record {row}")
        return found


class FittedSeries(_Fitted, frozen=True, tag="series"):
    declared: Series
    offset: float
    factor: float
    """The model gets (value - offset) / factor."""
    low: float
    high: float
    longest: int
    """Numbers in the longest list of the training records."""
    cut: int = 0
    """Training records whose list is longer than `max_length`."""
    gaps: int = 0
    """Training records with a gap inside of their list."""

    @property
    def length(self) -> int:
        return self.declared.max_length

    def encode_lists(self, lists: Lists) -> tuple[Array, Array]:
        """float32 [n, length], and the mask bool [n, length]. Raises MissingValues, DataError."""
        if self.declared.missing == "error":
            self.refuse_missing(lists.absent | (lists.count_gaps() > 0))
        values, mask = lists.pad(self.length, self.offset)
        with np.errstate(over="ignore"):
            scaled = ((values - self.offset) / self.factor).astype(np.float32)
        scaled[~mask] = self.declared.pad
        if not np.isfinite(scaled).all():
            row, at = (int(one[0]) for one in np.nonzero(~np.isfinite(scaled)))
            raise DataError(
                f"column '{self.name}' of record {row}: {float(values[row, at])!r} at place {at} of the list is a "
                "number that float32 cannot hold"
            )
        return scaled, mask


class FittedLabel(_Fitted, frozen=True, tag="label"):
    declared: Label
    classes: tuple[str, ...] = ()
    offset: float = 0.0
    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0
    counts: tuple[int, ...] = ()
    """Training records of each class."""

    @cached_property
    def indices(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self.classes)}

    def encode_keys(self, keys: Iterable[str | None]) -> Array:
        known = self.indices
        listed = list(keys)
        for row, key in enumerate(listed):
            if key not in known:
                what = "no value" if key is None else f"'{key[:64]}'"
                raise DataError(
                    f"label '{self.name}' of record {row} is {what}, expected one of the {len(known)} classes of the "
                    f"training records: {join_names(self.classes[:8])}"
                )
        return np.array([known[str(key)] for key in listed], np.int64)

    def encode_values(self, values: cells.Floats) -> Array:
        self.refuse_missing(np.isnan(values))
        return ((values - self.offset) / self.factor).astype(np.float32)


FittedColumn: TypeAlias = FittedNumber | FittedCategory | FittedText | FittedImage | FittedSeries | FittedLabel


def split_text(text: str, declared: Text) -> list[str]:
    """The words or characters of a text, in Unicode's composed form (NFC).

    >>> split_text("It's  fine.", Text(max_length=8))
    ['it', "'", 's', 'fine', '.']
    """
    text = unicodedata.normalize("NFC", text)
    text = text.lower() if declared.lower else text
    return _WORD.findall(text) if declared.unit == "words" else list(text)


def decode_image(content: bytes, declared: Image, where: str) -> Array:
    """float32 [channels, height, width] of an encoded image, upright as its EXIF data say. Raises DataError."""
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise DataError(f"{where} is an image, and Pillow is not installed", hint="pip install pillow") from error
    height, width = declared.height_width
    try:
        with Pillow.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{where} has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
            upright = ImageOps.exif_transpose(image).convert("L" if declared.channels == 1 else "RGB")
            if upright.size != (width, height):
                upright = upright.resize((width, height), Pillow.Resampling.BILINEAR)
            pixels = np.asarray(upright, np.float32) / np.float32(255)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise DataError(f"{where}: expected an image (PNG, JPEG, ...), got {len(content)} bytes: {error}") from error
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    for at in range(declared.channels):
        mean = declared.mean[at] if declared.mean else 0.0
        std = declared.std[at] if declared.std else 1.0
        if declared.mean or declared.std:
            planes = planes.copy() if at == 0 else planes
            planes[at] = (planes[at] - np.float32(mean)) / np.float32(std)
    return planes


def count_values(column: FittedColumn) -> int:
    """Numbers that one record becomes."""
    if isinstance(column, FittedText | FittedSeries):
        return column.length * (2 if column.declared.mask else 1)
    if isinstance(column, FittedImage):
        height, width = column.declared.height_width
        return column.declared.channels * height * width
    return column.width if isinstance(column, FittedNumber) else 1


def encode_array(column: FittedColumn, array: Any) -> Any:
    """The model's values of an Arrow array: see the `encode_` functions. Raises DataError."""
    if isinstance(column, FittedNumber):
        return column.encode_values(cells.numbers_of_array(array, column.name))
    if isinstance(column, FittedText):
        return column.encode_texts(cells.texts_of_cells(array.to_pylist(), column.name))
    if isinstance(column, FittedImage):
        return column.encode_images(array.to_pylist())
    if isinstance(column, FittedSeries):
        return column.encode_lists(lists_of_array(array, column.name))
    if isinstance(column, FittedLabel) and column.declared.number:
        return column.encode_values(cells.numbers_of_array(array, column.name))
    if isinstance(column, FittedLabel):
        return column.encode_keys(map(cells.category_key, array.to_pylist()))
    coded = array.dictionary_encode()  # each value is looked up once
    table = [column.index(cells.category_key(value)) for value in coded.dictionary.to_pylist()]
    places = coded.indices.fill_null(len(table)).to_numpy(zero_copy_only=False)
    found = np.array([*table, MISSING], np.int64)[places]
    column.check(found)
    return found


def json_of_cell(column: FittedColumn, value: Any) -> Any:
    """A cell of a table as a request has it; a list that CSV has as text is a list again."""
    if isinstance(column, FittedSeries) and isinstance(value, str) and value:
        value = lists_of_cells([value], column.name).numbers.tolist()
    return cells.to_json(value)


def encode_cells(column: FittedColumn, values: Sequence[object]) -> Any:
    """The same of JSON's values. Raises DataError."""
    if isinstance(column, FittedNumber):
        return column.encode_values(cells.numbers_of_cells(values, column.name, column.type))
    if isinstance(column, FittedText):
        return column.encode_texts(cells.texts_of_cells(values, column.name))
    if isinstance(column, FittedImage):
        return column.encode_images(cells.bytes_of_cells(values, column.name))
    if isinstance(column, FittedSeries):
        return column.encode_lists(lists_of_cells(values, column.name))
    return column.encode_keys(cells.keys_of_cells(values, column.name, column.type))
