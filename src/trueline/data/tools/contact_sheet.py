"""A contact sheet of samples: columns of images (binary that Pillow can decode, or nested lists of grey values), each
with the values of the other columns."""

from __future__ import annotations

import io
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trueline import files
from trueline.errors import DataError, UsageError, join_names

if TYPE_CHECKING:
    from PIL.Image import Image

TILE, CAPTION, GAP, WIDE = 160, 26, 8, 6
"""Pixels of a picture's longer side, of the two lines below it, between tiles; pictures of a row."""
_CAPTION_CHARS = 26


def draw(samples: pa.Table, path: str | PathLike[str]) -> int:
    """Writes the PNG file `path` and returns the number of images on it. Raises DataError without a column of images,
    UsageError when Pillow is not installed, StorageError."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise UsageError("--pictures needs Pillow, which is not installed", hint="pip install pillow") from error
    rows: list[dict[str, Any]] = samples.to_pylist()
    tiles: list[tuple[Image.Image, list[str]]] = []
    for number, row in enumerate(rows, 1):
        pictures = {name: picture for name, value in row.items() if (picture := _picture(value)) is not None}
        rest = ", ".join(f"{name} {value}" for name, value in row.items() if name not in pictures)
        tiles += [(picture, [f"{number}: {name} {size(picture)}", rest]) for name, picture in pictures.items()]
    if not tiles:
        raise DataError(
            f"none of the columns {join_names(samples.column_names)} holds images in {len(rows)} samples",
            hint="images are encoded (PNG, JPEG, ...) or nested lists of grey values",
        )
    across = min(WIDE, len(tiles))
    down = -(-len(tiles) // across)
    width, height = TILE + GAP, TILE + CAPTION + GAP
    sheet = Image.new("RGB", (across * width + GAP, down * height + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (picture, lines) in enumerate(tiles):
        x, y = GAP + number % across * width, GAP + number // across * height
        scale = TILE / max(picture.size)  # small images are enlarged pixel by pixel
        resampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        fitted = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        shown = picture.convert("RGB").resize(fitted, resampling)
        sheet.paste(shown, (x + (TILE - shown.width) // 2, y + (TILE - shown.height) // 2))
        caption = "\n".join(line[:_CAPTION_CHARS] for line in lines)
        pen.multiline_text((x, y + TILE + 2), caption, fill="black", spacing=1)
    encoded = io.BytesIO()
    sheet.save(encoded, "PNG")
    files.write_atomic(Path(fspath(path)), encoded.getvalue())
    return len(tiles)


def size(picture: Image) -> str:
    """`640x480`."""
    return f"{picture.width}x{picture.height}"


def image_of(value: bytes) -> Image | None:
    """The encoded image, or None, also without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        image = Image.open(io.BytesIO(value))
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return image


def _picture(value: object) -> Image | None:
    if isinstance(value, bytes):
        return image_of(value)
    if not isinstance(value, list) or not value or not all(isinstance(row, list) for row in value):
        return None
    try:
        grey = np.array(value, np.float64)
    except (ValueError, TypeError):  # rows of several lengths, or not of numbers
        return None
    if grey.ndim != 2 or not grey.size or not np.isfinite(grey).all():
        return None
    from PIL import Image

    low, high = grey.min(), grey.max()
    scaled = (grey - low) / (high - low) if high > low else np.zeros_like(grey)
    return Image.fromarray((255 * scaled).astype(np.uint8))
