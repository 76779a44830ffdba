"""A recipe written in cells reaches other processes by its source, or the error names what cannot travel."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from trueline.columns import Category, Label, Number

CELLS = """
import math
import collections as things
from functools import partial
RATE, NAMES = 0.25, ["a", "b"]
%%
def double(value):
    return 2 * value

class Net:
    width = RATE
    def __init__(self):
        self.layer = double(RATE)
%%
class Empty(Net): pass

def model(): return Empty()

@partial
def loss(outputs, labels): return math.fsum(outputs)
%%
loss = lambda outputs, labels: math.fsum(outputs)
def make_optimizer(params: "things.Counter"): return partial(double, params)
optimizer = make_optimizer

def dataset(mode): return NAMES
epochs = 3
name = "cells"
"""

DRIVER = """
import linecache, sys
cells = open(sys.argv[1]).read().split("%%\\n")
In = [""]
for number, cell in enumerate(cells):
    file = f"<cell-{number}>"
    linecache.cache[file] = (len(cell), None, cell.splitlines(True), file)
    In.append(cell)
    exec(compile(cell, file, "exec"), globals())
from trueline.errors import RecipeError
from trueline.recipe.load import load_recipe
try:
    recipe = load_recipe("__main__")
    print(recipe.path)
    made = recipe.model()
    shown = recipe.name, recipe.defaults.epochs, made.layer, type(made).__name__
    print(*shown, recipe.loss([1, 2], 0), recipe.dataset(0))
except RecipeError as error:
    print(error.message, *error.__notes__)
"""


def run(folder: Path, cells: str) -> list[str]:
    """What a prompt prints that has run `cells`."""
    (folder / "cells").write_text(cells)
    command = [sys.executable, "-c", DRIVER, str(folder / "cells")]
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "PATH": "", "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert not done.stderr
    return done.stdout.splitlines()


def test_functions_classes_imports_and_plain_values_travel_as_a_file(tmp_path: Path) -> None:
    path, shown = run(tmp_path, CELLS)
    assert shown == "cells 3 0.5 Empty 3.0 ['a', 'b']"
    text = Path(path).read_text()
    assert Path(path).is_relative_to(tmp_path / "cache" / "trueline" / "recipes")
    assert "import collections as things" not in text  # an annotation as text: nothing reads it
    alone = f"import runpy; print(runpy.run_path({path!r})['model']().layer)"
    assert subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True).stdout == "0.5\n"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("table = object()\ndef dataset(mode): return table", "dataset() uses 'table', a builtins.object"),
        ("def outer():\n    k = 2\n    def loss(o, l): return k\n    return loss\nloss = outer()",
         "'loss' was made inside another function and uses its k"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_named_with_what_uses_it(tmp_path: Path, cell: str, message: str) -> None:
    (said,) = run(tmp_path, f"{CELLS}%%\n{cell}\n")
    assert message in said
    assert "hint: " in said


COLUMNS = """
from trueline.columns import Category, Label, Number
AGE = Number(missing="mean")
columns = {"age": AGE, "city": Category(rare=2), "left": Label()}
%%
"""


def test_declared_columns_travel_by_their_statement_unless_they_were_changed_since(tmp_path: Path) -> None:
    for number, (cell, expected) in enumerate(
        (("pass", "cells 3 "), ("columns.pop('city')", "the recipe uses 'columns', a "))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        shown = run(folder, f"{CELLS}%%{COLUMNS}{cell}\n")
        assert shown[-1].startswith(expected)
        for path in (folder / "cache").rglob("*.py"):
            columns = runpy.run_path(str(path))["columns"]
            assert columns == {"age": Number(missing="mean"), "city": Category(rare=2), "left": Label()}
        assert len([*(folder / "cache").rglob("*.py")]) == (cell == "pass")
