"""From the handler that a manifest names to the function that answers. Runs in the handler's process.

    "my_handler.py", "my_handler"     the module's function `handle(data, context)`, else its one class
    "my_handler:answer"               the module's function of that name
    "image_classifier", ...           a default handler of the `ts` package

A function is called once with data None when it is loaded, so that it can load its model; of a class `initialize` is.
Source: TorchServe's model_loader, as docs/guides/torchserve.md says it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

DEFAULTS = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "text_classifier",
    "text_handler",
    "vision_handler",
)

Entry = Callable[[Any, Any], Any]
Initialize = Callable[[Any], Any]


class NoHandler(Exception):
    """The archive holds no handler of that name; the message says what was looked for."""


def load(handler: str, folder: Path) -> tuple[Entry, Initialize]:
    """What answers, and what is called before. Raises NoHandler, and whatever the handler's module raises."""
    named, _, function = handler.partition(":")
    module = _module(named.rsplit("/", 1)[-1].removesuffix(".py"), folder)
    found = getattr(module, function or "handle", None)
    if callable(found) and not inspect.isclass(found):
        entry: Entry = found
        return entry, lambda context: entry(None, context)
    if function:
        raise NoHandler(f"the handler module '{module.__name__}' has no function '{function}'")
    made = _class(module)()
    return made.handle, made.initialize


def _module(name: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    if path.is_file():
        if name in sys.modules:
            raise NoHandler(f"the handler's file is called as the module '{name}' that is in use already; rename it")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None  # it is a .py file
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    if name in DEFAULTS:
        return importlib.import_module(f"ts.torch_handler.{name}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise NoHandler(
            f"there is no handler '{name}': neither {name}.py in the archive nor a default ({', '.join(DEFAULTS)})"
        ) from error


def _class(module: ModuleType) -> Any:
    """The one class that the module defines; of a family, its youngest. Raises NoHandler."""
    own = [one for _, one in inspect.getmembers(module, inspect.isclass) if one.__module__ == module.__name__]
    able = [one for one in own if hasattr(one, "handle") and hasattr(one, "initialize")]
    leaves = [one for one in able if not any(other is not one and issubclass(other, one) for other in able)]
    if len(leaves) != 1:
        raise NoHandler(
            f"the handler module '{module.__name__}' is to have a function handle(data, context) or one class with "
            f"initialize and handle; it has the classes {', '.join(one.__name__ for one in own) or 'none'}"
        )
    return leaves[0]
