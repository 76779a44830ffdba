"""What the base installation leaves out is an error that names the extra to install."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trueline.errors import MissingPackage, TruelineError
from trueline.extras import EXTRA_OF, naming_extras
from worlds import bundles

ROOT = Path(__file__).parents[2]
DISTRIBUTION = {
    "PIL": "pillow", "google": "protobuf", "grpc": "grpcio", "opentelemetry": "opentelemetry-sdk", "yaml": "pyyaml",
    "prometheus_client": "prometheus-client", "torch_pruning": "torch-pruning",
}  # fmt: skip
"""By import name, where they differ."""
COME_ALONG = {
    "onnx_ir": "a dependency of onnxscript",
    "pandas": "a dependency of mlflow",
    "_typeshed": "read by type checkers alone",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=! ]", one)[0] for one in requirements}


def test_each_package_is_in_the_extra_that_its_error_names_and_not_in_the_base() -> None:
    for package, extra in EXTRA_OF.items():
        distribution = DISTRIBUTION.get(package, package)
        assert distribution in names_of(PROJECT["optional-dependencies"][extra])
        assert distribution not in names_of(PROJECT["dependencies"])


def test_an_extra_has_what_the_extras_that_it_names_have() -> None:
    for extra, requirements in PROJECT["optional-dependencies"].items():
        inner = [
            name
            for one in requirements
            if (found := re.match(r"trueline\[(.*)\]", one))
            for name in found[1].split(",")
        ]
        assert set(inner) <= set(PROJECT["optional-dependencies"]), extra


def test_every_package_that_the_source_imports_is_one_that_pip_installs_with_it() -> None:
    """What only `dev` or `docs` declares is missing where a user installs Trueline."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "src" / "trueline").rglob("*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    roots = {name.partition(".")[0] for name in imported} - {*sys.stdlib_module_names, "trueline", *COME_ALONG}
    extras = PROJECT["optional-dependencies"]
    declared = names_of(PROJECT["dependencies"]).union(
        *(names_of(requirements) for extra, requirements in extras.items() if extra not in ("dev", "docs"))
    )
    assert {name for name in roots if DISTRIBUTION.get(name, name) not in declared} == set()


@pytest.mark.parametrize("package", sorted(EXTRA_OF))
def test_a_missing_package_names_its_extra_and_is_also_an_import_error(package: str) -> None:
    with (
        pytest.raises(MissingPackage, match=f"needs the package {package}, which is not installed") as caught,
        naming_extras(),
    ):
        raise ModuleNotFoundError("No module", name=f"{package}.inner")
    assert caught.value.hint == f"pip install 'trueline[{EXTRA_OF[package]}]'"
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, TruelineError)


def test_a_missing_package_of_the_user_stays_what_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="my_own") as caught, naming_extras():
        raise ModuleNotFoundError("No module named my_own", name="my_own")
    assert not isinstance(caught.value, MissingPackage)


@pytest.mark.slow
def test_a_verb_that_needs_an_extra_names_it_on_the_command_line_and_in_python(tmp_path: Path) -> None:
    bundle, recipe = bundles.scaled(tmp_path / "a.bundle").path, tmp_path / "recipe.py"
    recipe.write_text("import torch\n")
    code = f"""
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(EXTRA_OF)!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Wall())
import trueline
from trueline.cli.app import run
for arguments in (["train", {str(recipe)!r}], ["register", {str(bundle)!r}], ["data", "inspect", "a.csv"]):
    print(run(arguments), file=sys.stderr)
for call in (lambda: trueline.train({str(recipe)!r}), lambda: trueline.evaluate):
    try:
        call()
    except trueline.errors.MissingPackage as error:
        print("python:", error.hint, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stderr.count("pip install 'trueline[train]'") == 4, done.stderr
    assert done.stderr.count("hint: pip install 'trueline[mlflow]'") == 1, done.stderr
