"""The check of the house finds what it looks for, each in a tree that has nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

import house


def breaches(root: Path, files: dict[str, str], unused: frozenset[str] = frozenset()) -> list[str]:
    """The lines of the check for a package `pkg` of `files`, without the folder of the test."""
    for name, text in files.items():
        path = root / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [line.replace(f"{root}/", "") for line in house.breaches(root / "pkg", unused)]


@pytest.mark.parametrize(
    "there_and_back",
    [
        ("from pkg import b\n", "from pkg import a\n"),
        ("from pkg.b import y\n", "def f():\n    from pkg.a import x\n"),
        ("import pkg.b\n", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.a import x\n"),
        ("from . import b\n", "from .a import x\n"),
    ],
    ids=["plain", "inside a function", "for types", "relative"],
)
def test_a_circle_of_imports_is_found_whatever_kind_of_import_closes_it(
    tmp_path: Path, there_and_back: tuple[str, str]
) -> None:
    first, second = there_and_back
    files = {"__init__.py": "", "a.py": first, "b.py": second, "c.py": "from pkg import a, b\n"}
    assert breaches(tmp_path, files) == ["import circle: pkg.a pkg.b"]


def test_a_tree_within_the_rules_has_no_breach(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "a.py": "from pkg import b\n\n\ndef encode(value: int) -> int:\n    return value\n",
        "b.py": "class Taken:\n    @property\n    def closed(self) -> bool:\n        return True\n",
        "c.py": "import asyncio\n\n\nclass Wide(asyncio.Protocol):\n"
        + "".join(f"    def m{i}(self): ...\n" for i in range(5))
        + "    def done(self): ...\n",
    }
    assert breaches(tmp_path, files) == []


@pytest.mark.parametrize(
    ("text", "breach"),
    [
        ("x = 1\n" * 401, "pkg/a.py: 401 lines, 400 at most"),
        ("def f():\n" + "    x = 1\n" * 50, "pkg/a.py:1: f has 51 lines, 50 at most"),
        ("def f(a, b, c, d, e, f, *, g, h, i): ...\n", "pkg/a.py:1: f takes 9 parameters, 8 at most"),
        ("def told(): ...\n", "pkg/a.py:1: told is a participle; a function is named by what it does"),
        ("async def _opened(): ...\n", "pkg/a.py:1: _opened is a participle; a function is named by what it does"),
        ("class Weather: ...\n", "pkg/a.py:1: docs/glossary.md has another word for Weather"),
        (
            "from typing import Protocol\n\n\nclass P(Protocol):\n"
            + "".join(f"    def m{i}(self): ...\n" for i in range(5)),
            "pkg/a.py:4: P has 5 methods, 4 at most",
        ),
    ],
)
def test_what_is_too_large_or_wrongly_named_is_found(tmp_path: Path, text: str, breach: str) -> None:
    assert breaches(tmp_path, {"a.py": text}, frozenset({"weather"})) == [breach]


def test_a_class_name_that_stands_twice_is_found_unless_it_is_private(tmp_path: Path) -> None:
    files = {"a.py": "class Twice: ...\n\n\nclass _Own: ...\n", "b.py": "class Twice: ...\n\n\nclass _Own: ...\n"}
    assert breaches(tmp_path, files) == ["class Twice stands 2 times: pkg/a.py:1 pkg/b.py:1"]


def test_a_folder_of_too_many_files_and_too_many_lines_in_all_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "MAX_LINES", 20)
    found = breaches(tmp_path, {f"m{number}.py": "x = 1\n" for number in range(21)})
    assert found == ["pkg: 21 lines, 20 at most", "pkg: 21 files, 20 at most"]


def test_a_module_has_no_name_that_the_glossary_does_not_use(tmp_path: Path) -> None:
    unused = house.unused_words("# Glossary\n\n## Not used\n\n- `weather`: storm plan\n\n## Further\n\n- `rain`: x\n")
    assert unused == {"weather"}
    found = breaches(tmp_path, {"weather.py": "", "rain.py": ""}, unused)
    assert found == ["pkg/weather.py: docs/glossary.md has another word for weather"]


def test_serving_reaches_fewer_than_twenty_modules_of_runtime() -> None:
    """A server opens programs; what else runtime knows is none of its memory or its start."""
    modules = house.modules_of(house.ROOT / "src" / "trueline")
    reached, todo = set(), [name for name in modules if name.startswith("trueline.serve")]
    while todo:
        for other in house.imports_of(modules[todo.pop()], modules) - reached:
            reached.add(other)
            todo.append(other)
    assert len([name for name in reached if name.startswith("trueline.runtime.")]) < 20
    assert not [name for name in reached if name.startswith(("trueline.capture", "trueline.train"))]


def test_the_folders_of_the_tests_are_those_of_the_source() -> None:
    """`ground` tests what holds for all packages, `line` several verbs after each other."""
    tests = house.ROOT / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path("ground"), Path("line")}
    odd = [str(folder) for folder in folders if not (house.ROOT / "src/trueline" / folder / "__init__.py").is_file()]
    assert not odd, f"no package of src/trueline: {odd}"
