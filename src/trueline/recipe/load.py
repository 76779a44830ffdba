"""Loads a file, an import path or an object as a Recipe with checked blanks.

Promise: all problems of a recipe are in one RecipeError that names the blanks, their expected form and the actual one,
before anything heavy starts. The loader itself imports no torch (the recipe may). It runs the recipe's top level once
for each content of the file, under a name in `sys.modules` that follows from path and content: classes of the recipe
can be pickled, and have the same name in every process.
"""

import importlib
import importlib.util
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from trueline import files
from trueline.errors import RecipeError, UsageError, closest, join_names
from trueline.extras import translate
from trueline.recipe import blanks, cells
from trueline.recipe.blanks import Definitions
from trueline.recipe.contract import Recipe
from trueline.recipe.elasticdl import provide_layers

_FILE = "recipe.py"
CELLS = "recipes"
"""Folder of the user's cache for recipes that were written in a notebook."""
_PREFIX = "trueline_recipe_"


def load_recipe(source: object, *, needs: Sequence[str] | None = None) -> Recipe:
    """Loads a recipe: a `.py` file or its folder, `package.module:object`, a module, an object or a mapping.

    With `needs`, other required blanks may be missing, and raise RecipeError when they are called; without the data set
    there have to be examples. Raises RecipeError that lists all missing and misspelt blanks and those of the wrong
    kind.
    """
    if isinstance(source, Recipe):
        return source
    if isinstance(source, Path) or (isinstance(source, str) and _is_file_name(source)):
        return blanks.fill(_from_file(Path(source)), needs)
    loaded, where = (_import_object(source), source) if isinstance(source, str) else (source, "")
    return loaded if isinstance(loaded, Recipe) else blanks.fill(_from_object(loaded, where), needs)


def locate_recipe(recipe: Recipe, given: object, *, otherwise: str = "") -> str:
    """The path or import path from which other processes load `recipe`, which was loaded from `given`. Raises
    UsageError; `otherwise` ends its hint."""
    if recipe.path is not None:
        return str(Path(recipe.path).resolve())
    if isinstance(given, str):
        return given
    raise UsageError(
        f"recipe '{recipe.name}' has no file that worker processes could load",
        hint=f"pass the path of its file or 'package.module:object'{otherwise}",
    )


def _is_file_name(text: str) -> bool:
    path = Path(text)
    return path.suffix == ".py" or "/" in text or path.is_dir() or (":" not in text and path.exists())


def _from_file(given: Path) -> Definitions:
    path = given / _FILE if given.is_dir() else given
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"cannot read the recipe {path}: {error.strerror or error}",
            hint="`trueline init NAME` writes a recipe to start from",
        ) from error
    if path.suffix != ".py":
        raise RecipeError(f"{path} is not a Python file; a recipe is a .py file with the blanks filled in")
    module = _run(path.resolve(), content, str(path))
    default = path.resolve().parent.name if path.name == _FILE else path.stem
    return Definitions(
        values=vars(module),
        where=str(path),
        module=module.__name__,
        default_name=default,
        path=path.resolve(),
        digest=files.sha256_bytes(content),
    )


def _run(path: Path, content: bytes, shown: str) -> ModuleType:
    key = files.sha256_bytes(str(path).encode() + b"\0" + content)[:16]
    name = _PREFIX + key
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise RecipeError(f"{shown} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importable(path.parent), provide_layers():
            exec(compile(content, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _load_error(error, path.parent, f"recipe {shown}") from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Puts the recipe's folder first on the import path, for its helper modules, and afterwards last, before older
    recipes'. A function of an older recipe that imports a helper when it is called gets a newer recipe's namesake."""
    others = _recipe_folders() - {folder}
    for helper in folder.glob("*.py"):  # two recipes may each have a `helpers.py`, and each has to import its own
        known = getattr(sys.modules.get(helper.stem), "__file__", None)
        if known and Path(known).parent in others:
            del sys.modules[helper.stem]
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        if entry not in sys.path:
            older = [index for index, known in enumerate(sys.path) if Path(known) in _recipe_folders()]
            sys.path.insert(min(older, default=len(sys.path)), entry)


def _recipe_folders() -> set[Path]:
    """Folders of the recipe files that this process has loaded."""
    loaded = [module for name, module in sys.modules.items() if name.startswith(_PREFIX)]
    return {Path(module.__file__).parent for module in loaded if module.__file__}


def _load_error(error: BaseException, folder: Path, what: str) -> RecipeError:
    place = blanks.blame(error, folder)
    hint = f"see {place}" if place else ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = translate(error)
        hint = f"install {error.name}, or put {error.name.split('.')[0]}.py beside the recipe"
        hint = missing.hint if missing is not None else hint
    if isinstance(error, SyntaxError):
        return RecipeError(f"{what} is not valid Python, at {place}: {error.msg}", hint=hint)
    at = f", at {place}" if place else ""
    return RecipeError(f"{what} fails while it loads{at}: {type(error).__name__}: {error}", hint=hint)


def _import_object(text: str) -> object:
    module_name, _, attribute = text.partition(":")
    folder = Path.cwd()
    try:
        with _importable(folder), provide_layers():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError | ValueError):
            raise RecipeError(
                f"cannot import '{module_name or text}': {type(error).__name__}: {error}",
                hint="give a path to a .py file, or package.module:object that Python can import from here",
            ) from error
        raise _load_error(error, folder, f"recipe {text}") from error
    found: object = module
    for part in attribute.split(".") if attribute else ():
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            near = closest(part, names)
            hint = f"did you mean '{near}'?" if near else f"it has: {join_names(names)}"
            raise RecipeError(f"'{module_name}' has no '{attribute}'", hint=hint)
        found = getattr(found, part)
    return found


def _write_cells(values: Mapping[str, Any]) -> Path:
    """The recipe of a notebook's cells as a file in this user's cache, by its content: other processes load it."""
    given = {**vars(sys.modules["__main__"]), **values}
    text = cells.source_of(given, [name for name in blanks.known_names() if values.get(name) is not None])
    name = values.get("name", "notebook")
    path = files.user_cache() / CELLS / files.sha256_bytes(text.encode())[:16] / f"{name}.py"
    files.write_atomic(path, text.encode(), mode=0o600)
    linecache.checkcache(str(path))
    return path


def _from_object(found: object, where: str) -> Definitions:
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as error:
            why = f"the recipe class {found.__name__} takes arguments: {error}"  # type: ignore[attr-defined]
            raise RecipeError(why, hint="give an instance of it") from error
    if isinstance(found, Mapping):
        values = {str(key): value for key, value in found.items()}
        module, default = "", "recipe"
    elif isinstance(found, ModuleType):
        values, module, default = dict(vars(found)), found.__name__, found.__name__.rpartition(".")[2]
    else:
        values = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
        module, default = "", type(found).__name__
    where = where or (f"module {module}" if module else f"object of type {type(found).__name__}")
    if any(cells.is_of_cells(values.get(name)) for name in blanks.known_names()):
        return _from_file(_write_cells(values))
    file = blanks.source_file(found, values)
    digest = files.sha256_file(file) if file else blanks.digest_without_file(values)
    return Definitions(values=values, where=where, module=module, default_name=default, path=None, digest=digest)
