"""Deltas in the model store: `NAME/7.delta` becomes `NAME/7.bundle`, which is then served as any new version is.

One process of those that share the store applies a delta, the others find the bundle. A delta that is refused is tried
again when its files change, or when another bundle of the model is there, which may be its parent.
"""

import shutil
import time
from collections.abc import Collection
from pathlib import Path

from trueline import events, files
from trueline.bundle import delta as deltas
from trueline.bundle import schema
from trueline.bundle.read import open_folder
from trueline.errors import BundleError, TruelineError

KEPT = 3
"""Newest versions of a model that stay when a delta has been applied. Older ones that deltas made are removed."""
_BUNDLE = ".bundle"
_State = tuple[object, ...]


class DeltaApplier:
    """`folder`: the model store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._refused: dict[Path, _State] = {}

    def apply_due(self, used: Collection[tuple[str, str]] = ()) -> None:
        """Applies what has not been applied yet. Blocks. `used`: models and versions that stay, whatever their age."""
        for found in sorted(self._folder.glob(f"*/[!.]*{deltas.SUFFIX}"), key=_order):
            out = found.with_suffix(_BUNDLE)
            if found.is_dir() and not found.is_symlink() and not out.exists():
                self._apply(found, out, {version for model, version in used if model == found.parent.name})

    def _apply(self, delta: Path, out: Path, used: Collection[str]) -> None:
        state = _describe(delta)
        if self._refused.get(delta) == state:
            return
        model, version, began = delta.parent.name, delta.stem, time.perf_counter()
        try:
            with files.hold_lock(delta.parent / f".{version}.lock"):
                if out.exists():
                    return
                parent = _find_parent(delta)
                deltas.apply_delta(open_folder(parent), delta, out)
        except (TruelineError, OSError) as error:
            self._refused[delta] = state
            events.emit("delta.refused", model=model, version=version, why=str(error))
            return
        self._refused.pop(delta, None)
        took = time.perf_counter() - began
        events.emit("delta.applied", model=model, version=version, parent=parent.stem, seconds=round(took, 3))
        _prune(delta.parent, used)


def _order(delta: Path) -> tuple[str, int, str]:
    return delta.parent.name, int(delta.stem) if delta.stem.isdecimal() else 0, delta.stem


def _describe(delta: Path) -> _State:
    """Of the delta's files and of the bundles beside it: while nothing of it changes, nothing else comes out."""
    own = sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in delta.rglob("*") if one.is_file())
    return (*own, *sorted(one.name for one in delta.parent.glob(f"*{_BUNDLE}")))


def _find_parent(delta: Path) -> Path:
    """The bundle of the model that the delta is for. Raises BundleError."""
    wanted = deltas.read_delta(delta).parent
    for one in delta.parent.glob(f"*{_BUNDLE}/{schema.MANIFEST}"):
        if schema.decode(one.read_bytes(), str(one)).digest == wanted:
            return one.parent
    raise BundleError(
        f"{delta} is for the bundle {wanted[:12]}, and no version in {delta.parent} is that one",
        hint="copy the deltas before it, or the whole bundle",
    )


def _prune(folder: Path, used: Collection[str]) -> None:
    """Removes the oldest versions that deltas made. A program that is still served has its file open."""
    made = [one for one in folder.glob(f"*{_BUNDLE}") if one.stem.isdecimal()]
    for old in sorted(made, key=lambda one: int(one.stem))[:-KEPT]:
        delta = old.with_suffix(deltas.SUFFIX)
        if old.stem not in used and delta.is_dir():
            shutil.rmtree(delta, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
