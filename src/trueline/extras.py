"""Packages that the base installation leaves out, and the extra that installs each.

`pip install trueline` serves bundles. What only training, export, the registry or one kind of source needs is imported
where it is used; `translate` turns the ModuleNotFoundError into an error that names the command to type.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from trueline.errors import MissingPackage

EXTRA_OF = {
    "torch": "train",
    "pyarrow": "train",
    "onnx": "train",
    "onnxscript": "train",
    "pathspec": "train",
    "psutil": "train",
    "xxhash": "train",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "sqlalchemy": "sql",
    "PIL": "images",
    "torch_pruning": "prune",
    "openvino": "openvino",
    "nncf": "openvino",
    "optuna": "search",
    "torchao": "inductor",
    "numba": "numba",
    "llvmlite": "numba",
    "ray": "ray",
}
"""Import name of a package: the extra of pyproject.toml that installs it. A test compares both."""


def translate(error: ModuleNotFoundError) -> MissingPackage | None:
    """The error that names the extra, or None if `error` is about a package that no extra installs."""
    name = (error.name or "").partition(".")[0]
    if name not in EXTRA_OF:
        return None
    extra = EXTRA_OF[name]
    return MissingPackage(
        f"this needs the package {name}, which is not installed: the base installation only serves models",
        hint=f"pip install 'trueline[{extra}]'",
    )


@contextmanager
def naming_extras() -> Iterator[None]:
    """A package of an extra that is missing inside the block raises MissingPackage."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = translate(error)
        if missing is None:
            raise
        raise missing from error


def expect_package(name: str) -> None:
    """Raises MissingPackage where the package `name` of an extra is not installed; does not import it."""
    with naming_extras():
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
