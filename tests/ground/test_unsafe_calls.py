"""Calls that make objects or code of bytes, and patterns whose time explodes, stay where they are known to be harmless.

BentoML CVE-2024-2912, CVE-2024-9070, CVE-2025-27520, CVE-2025-32375; MLflow CVE-2023-6018, CVE-2024-0520,
CVE-2024-37052, CVE-2024-37053, CVE-2024-37054, CVE-2024-37056, CVE-2024-37060, CVE-2024-37061, CVE-2025-14287,
CVE-2025-15031, CVE-2025-15036, CVE-2025-15379; Ray CVE-2026-41486, CVE-2026-57516; SnakeYAML's CVE-2022-1471 in
TorchServe; PyTorch CVE-2025-32434. The replays are in `tests/torchserve/test_cves.py` and where each file is read.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from re import _constants as constants
from re import _parser as parser
from typing import Any

import pytest

ROOT = Path(__file__).parents[2] / "src" / "trueline"
FILES = sorted(ROOT.rglob("*.py"))
UNSAFE = re.compile(
    r"(c?[pP]ickle|cloudpickle|dill|joblib|marshal|shelve|jsonpickle)\.(loads?|Unpickler|open)|yaml\.(load|unsafe_load|full_load)"
    r"|os\.(system|popen|exec\w+|spawn\w+)|eval|exec|compile|__import__|\w+\.extractall|\w+\.extract|tempfile\.mktemp"
    r"|torch\.(load|jit\.load|export\.load|hub\.load)|np\.load|numpy\.load|os\.path\.expandvars|string\.Template"
)
KNOWN = {
    "cli/__init__.py": {"exec"},  # of an empty string
    "capture/proof/state/literal_sets.py": {"compile"},  # the user's own functions, with their sets given away
    "doctor/patch.py": {"eval", "exec", "compile"},  # the user's own class, rewritten
    "doctor/rewrites/tensors/size_tables.py": {"eval", "compile"},  # an expression of the user's own class
    "recipe/load.py": {"exec", "compile"},  # the user's recipe
    "recipe/cells.py": {"eval", "compile"},  # a statement of the user's own cell
    "recipe/template.py": {"pictures.extractall"},  # an archive of this package
    "cli/line/ship.py": {"os.execv"},  # a list of words
    "storage/cache.py": {"np.load"},  # allow_pickle=False
    "batch/predict.py": {"np.load"},  # the same
    "checkpoint/weights_file.py": {"torch.load"},  # weights_only=True
    "cli/jobs/chaos.py": {"os.execvp"},  # a list of words
    "data/loading/worker_pool.py": {"pickle.loads"},  # what a fork of this process wrote to memory without a name
    "serve/offload/frames.py": {"pickle.loads"},  # what a process of this package wrote to memory without a name
    "runtime/torchscript.py": {"torch.jit.load"},  # after torchscript_archive has checked every member and operator
    "runtime/torch_export.py": {"torch.export.load"},  # after torch_export_archive has checked every member
    "torchserve/compat/ts/torch_handler/base_handler.py": {"torch.load", "torch.jit.load"},  # in a handler's process
    "torchserve/compat/ts/torch_handler/text_handler.py": {"torch.load"},
}
"""By file, under src/trueline. Not of this list: `capture`, whose unpickling needs --trust."""


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_makes_objects_or_code_of_bytes_but_those_that_are_known_to(file: Path) -> None:
    name = str(file.relative_to(ROOT))
    unsafe = [(called, node) for called, node in calls(file) if UNSAFE.fullmatch(called)]
    if not name.startswith("capture/"):
        assert {called for called, _ in unsafe} <= KNOWN.get(name, set()), name
    for called, node in calls(file):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        assert "shell" not in given or ast.unparse(given["shell"]) == "False", f"{name}:{node.lineno}"
        if called == "np.load":
            assert ast.unparse(given["allow_pickle"]) == "False", f"{name}:{node.lineno}"
        if called == "torch.load":
            assert "weights_only" in given, f"{name}:{node.lineno}"
            assert ast.unparse(given["weights_only"]) == "True" or name.startswith("capture/"), f"{name}:{node.lineno}"


# patterns

OF_CLIENTS = ("web", "serve", "torchserve", "storage", "bundle", "registry", "runtime")
"""Rooms whose patterns meet text of clients or of files of strangers."""
UNAMBIGUOUS = {
    r"(?:/[\w.+-]+){2,}(?::\d+)?(?: [\w:*&<> ]+\([^)]*\)(?: const)?)?:? ?": "each round begins with a slash, which no "
    "round contains",
    r"(?:/[\w.+-]+){2,}": "the same",
    r"(?:/[\w.+-]+){2,}(?::\d+)?:?\s*": "the same",
    r"__torch__(\.(?!torch\.classes\b)\w+)* \w+|torch\._utils _rebuild_(tensor_v2|parameter)|collections OrderedDict"
    r"|torch \w+Storage|torch device|torch\.jit\._pickle (build_\w+list|restore_type_tag)": "each round begins "
    "with a dot",
}
"""Patterns that do, and why they read a text in one pass."""


def patterns() -> dict[str, str]:
    """The patterns of these rooms, with where they stand: literals, and what modules without torch have compiled."""
    found: dict[str, str] = {}
    for room in OF_CLIENTS:
        for file in sorted((ROOT / room).rglob("*.py")):
            where = str(file.relative_to(ROOT))
            for called, node in calls(file):
                if re.fullmatch(r"re\.(compile|sub|match|search|fullmatch|findall|split|finditer)", called):
                    text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
                    if isinstance(text, str | bytes):
                        found[text if isinstance(text, str) else text.decode("latin-1")] = where
            name = "trueline." + where.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if room in ("web", "serve", "storage", "bundle") and not name.endswith("__main__"):
                for one in vars(importlib.import_module(name)).values():
                    for part in one.values() if isinstance(one, dict) else [one]:
                        if isinstance(part, re.Pattern):
                            text = part.pattern
                            found[text if isinstance(text, str) else text.decode("latin-1")] = where
    return found


def unbounded(items: Any, inside: bool = False) -> bool:
    """Whether a repetition without end is inside another one: the ways to match then multiply with the length."""
    for op, value in items:
        if op in (constants.MAX_REPEAT, constants.MIN_REPEAT):
            _, most, body = value
            endless = most is constants.MAXREPEAT
            if (endless and inside) or unbounded(body, inside or endless):
                return True
        elif op is constants.SUBPATTERN:
            if unbounded(value[3], inside):
                return True
        elif op is constants.BRANCH:
            if any(unbounded(branch, inside) for branch in value[1]):
                return True
        elif op in (constants.ASSERT, constants.ASSERT_NOT) and unbounded(value[1], inside):
            return True
    return False


def test_no_pattern_that_meets_a_clients_text_repeats_a_repetition() -> None:
    """ReDoS, as CVE-2024-24762 in python-multipart, which BentoML's servers use."""
    found = patterns()
    assert len(found) > 25
    assert unbounded(parser.parse(r"(?:\\.|[^\"]*)*"))
    nested = {text: where for text, where in found.items() if unbounded(parser.parse(text))}
    assert nested.keys() <= UNAMBIGUOUS.keys(), nested
    assert nested.keys() == UNAMBIGUOUS.keys(), "one of the exceptions is gone: take it off the list"


@pytest.mark.parametrize(
    "text", ["/" * 100_000, "/a" * 100_000, "a" * 300_000, "\\" * 100_000, " " * 100_000, "=" * 100_000]
)
def test_the_exceptions_read_long_texts_in_one_pass(text: str) -> None:
    for pattern in UNAMBIGUOUS:
        assert isinstance(re.sub(pattern, "", text), str)
