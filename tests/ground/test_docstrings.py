"""Worked examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import trueline

MODULES = [
    module.name
    for module in pkgutil.walk_packages(trueline.__path__, "trueline.")
    if "_pb2" not in module.name and not module.name.endswith("__main__") and "sitecustomize" not in module.name
]
NEEDED = {
    "trueline.ps.tables.compiled": "numba",
    "trueline.engine.cluster.ray_records": "ray",
    "trueline.engine.cluster.ray_side": "ray",
}
"""Modules that import a package which even development may lack."""


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of(name):
    if name in NEEDED:
        needed = NEEDED[name]  # the name of its extra as well
        pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'trueline[{needed}]'")
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
