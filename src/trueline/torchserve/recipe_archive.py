"""Writes a bundle and its recipe as one model archive, so that `preprocess` and `postprocess` are served too.

MAR-INF/MANIFEST.json    TorchServe's manifest; the handler is Trueline's
model-config.yaml        batch and workers
model.bundle/            the bundle, whole
recipe.py, ...           the recipe, and the modules beside it that it imports
"""

import json
import sys
from pathlib import Path

from trueline import events, files
from trueline.bundle import schema
from trueline.bundle.read import Bundle, open_bundle
from trueline.bundle.write import write_zip
from trueline.errors import StorageError, UsageError
from trueline.recipe.contract import ONLY_CALLED
from trueline.recipe.load import load_recipe
from trueline.serve.handlers.archive import MANIFEST
from trueline.serve.handlers.recipe_handler import BUNDLE, RECIPE

HANDLER = "trueline.serve.handlers.recipe_handler"


def archive(
    bundle: str | Path | Bundle, recipe: str | Path, out: str | Path, *, version: str = "1.0",
    any_recipe: bool = False, overwrite: bool = False, **batching: int,
) -> Path:  # fmt: skip
    """Writes the `.mar` at `out`, whole or not at all; equal arguments give equal bytes.

    `batching` goes to model-config.yaml: `batch_size`, `max_batch_delay_ms` and `workers`. The recipe is loaded to find
    the modules beside it that it imports. Raises UsageError if the bundle was captured from another recipe (unless
    `any_recipe`); BundleError, RecipeError, StorageError.
    """
    found = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
    loaded, out = load_recipe(recipe, needs=ONLY_CALLED), Path(out)
    if loaded.path is None:
        raise UsageError(f"{recipe} is no file, and an archive holds the recipe's file")
    if loaded.digest != found.manifest.lineage.recipe_digest and not any_recipe:
        raise UsageError(
            f"bundle '{found.name}' was captured from another recipe than {loaded.path.name}: its digest differs",
            hint="capture the bundle again, or add --any-recipe if only the code around the model has changed",
        )
    if out.suffix != ".mar":
        raise UsageError(f"{out} is to end in .mar: servers recognize archives by it")
    if out.exists() and not overwrite:
        raise StorageError(f"{out} exists already", hint="choose another name or ask to replace it")
    texts: dict[str, Path | str] = {MANIFEST: _manifest(found, version), "model-config.yaml": _config(**batching)}
    sources = {RECIPE: loaded.path, **_find_helpers(loaded.path)}
    sources |= {f"{BUNDLE}/{name}": found.path / name for name in (schema.MANIFEST, *found.manifest.files)}
    with files.atomic_file(out) as file:
        write_zip(file, texts | sources)
    events.emit("archive.written", path=str(out), digest=found.digest, modules=len(sources) - len(found.manifest.files))
    return out


def _manifest(bundle: Bundle, version: str) -> str:
    model = {"modelName": bundle.name, "modelVersion": version, "handler": HANDLER, "configFile": "model-config.yaml"}
    content = {"createdOn": bundle.manifest.created, "runtime": "python", "model": model, "bundle": bundle.digest}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _config(*, workers: int = 1, batch_size: int = 8, max_batch_delay_ms: int = 5) -> str:
    return f"minWorkers: {workers}\nbatchSize: {batch_size}\nmaxBatchDelay: {max_batch_delay_ms}\n"


def _find_helpers(recipe: Path) -> dict[str, Path]:
    """Modules in the recipe's folder that are imported now, by their path below it."""
    folder = recipe.parent.resolve()
    helpers = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/")
        beside = path.suffix == ".py" and path != recipe and path.is_relative_to(folder)
        if beside and not module.__name__.startswith("trueline") and "site-packages" not in path.parts:
            helpers[path.relative_to(folder).as_posix()] = path
    return dict(sorted(helpers.items()))
