"""A bundle and its recipe in one model archive, so that `preprocess` and `postprocess` are served too.

MAR-INF/MANIFEST.json    TorchServe's manifest; the handler is ours
model-config.yaml        batch and workers
model.bundle/            the bundle, whole
recipe.py, ...           the recipe, and the modules beside it that it imports
"""

from __future__ import annotations

import json
import shutil
import stat
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from trueline import events, files
from trueline.bundle import schema
from trueline.bundle.read import Bundle, open_bundle
from trueline.errors import StorageError, UsageError
from trueline.recipe.load import load_recipe
from trueline.serve.handlers.archive import MANIFEST
from trueline.serve.handlers.recipe_handler import BUNDLE, RECIPE

HANDLER = "trueline.serve.handlers.recipe_handler"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def archive(
    bundle: str | Path | Bundle,
    recipe: str | Path,
    out: str | Path,
    *,
    version: str = "1.0",
    batch_size: int = 8,
    max_batch_delay_ms: int = 5,
    workers: int = 1,
    any_recipe: bool = False,
    overwrite: bool = False,
) -> Path:
    """Writes the `.mar` at `out`, whole or not at all; equal arguments give equal bytes.

    The recipe is loaded to find the modules beside it that it imports. Raises UsageError when the bundle was captured
    from another recipe (unless `any_recipe`); BundleError, RecipeError, StorageError.
    """
    found = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
    loaded, out = load_recipe(recipe), Path(out)
    if loaded.path is None:
        raise UsageError(f"{recipe} is no file, and an archive holds the recipe's file")
    if loaded.digest != found.manifest.lineage.recipe_digest and not any_recipe:
        raise UsageError(
            f"bundle '{found.name}' was captured from another recipe than {loaded.path.name}: its digest differs",
            hint="capture the bundle again, or say --any-recipe if only what stands around the model has changed",
        )
    if out.suffix != ".mar":
        raise UsageError(f"{out} is to end in .mar: that is how servers know an archive")
    if out.exists() and not overwrite:
        raise StorageError(f"{out} exists already", hint="choose another name or ask to replace it")
    texts = {
        MANIFEST: _manifest(found, version),
        "model-config.yaml": f"minWorkers: {workers}\nbatchSize: {batch_size}\nmaxBatchDelay: {max_batch_delay_ms}\n",
    }
    sources = {RECIPE: loaded.path, **_helpers(loaded.path)}
    sources |= {f"{BUNDLE}/{name}": found.path / name for name in (schema.MANIFEST, *found.manifest.files)}
    with files.atomic_file(out) as file:
        _write(file, texts, sources)
    events.emit("archive.written", path=str(out), digest=found.digest, modules=len(sources) - len(found.manifest.files))
    return out


def _manifest(bundle: Bundle, version: str) -> str:
    model = {
        "modelName": bundle.name,
        "modelVersion": version,
        "handler": HANDLER,
        "configFile": "model-config.yaml",
    }
    told = {"createdOn": bundle.manifest.created, "runtime": "python", "model": model, "bundle": bundle.digest}
    return json.dumps(told, indent=1, sort_keys=True) + "\n"


def _helpers(recipe: Path) -> dict[str, Path]:
    """Modules in the recipe's folder that are imported now, by their place below it."""
    folder = recipe.parent.resolve()
    found = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/")
        ours = module.__name__.partition(".")[0]
        theirs = path.suffix == ".py" and path != recipe and path.is_relative_to(folder)
        if theirs and not ours.startswith("trueline") and "site-packages" not in path.parts:
            found[path.relative_to(folder).as_posix()] = path
    return dict(sorted(found.items()))


def _write(file: BinaryIO, texts: Mapping[str, str], sources: Mapping[str, Path]) -> None:
    with zipfile.ZipFile(file, "w") as made:
        for name, text in texts.items():
            made.writestr(_member(name), text)
        for name, path in sources.items():
            member = _member(name)
            member.file_size = path.stat().st_size
            with path.open("rb") as source, made.open(member, "w") as target:
                shutil.copyfileobj(source, target, 2**20)


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, _EPOCH)
    member.external_attr = (stat.S_IFREG | 0o644) << 16
    return member
