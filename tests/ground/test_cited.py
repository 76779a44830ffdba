"""The docs cite tests as what holds their promises: each of them exists, and `.ci/run` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CITED = re.compile(r"((?:[\w/]+/)?test_\w+\.py)(?:::(\w+)(…?))?")
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
NOT_IN_CI = re.compile(r"^pytestmark = .*mark\.(chaos|long)", re.MULTILINE)


def cited_file(name: str) -> Path:
    """The one file that a page can mean by `name`, which may leave out its folders."""
    meant = [path for path in FILES if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")]
    assert len(meant) == 1, f"{name} is {len(meant)} files"
    return meant[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_cited_test_exists(page: Path) -> None:
    for file, test, more in CITED.findall(page.read_text()):
        names = re.findall(r"def (test_\w+)", cited_file(file).read_text())
        assert not test or any(name.startswith(test) if more else name == test for name in names), f"{file}::{test}"


def test_ci_runs_every_file_that_the_promises_cite() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert "\nmake test " in ci
    assert '\n  make test-jobs JOBS_IN="$promised ' in ci
    page = (ROOT / "docs" / "promises.md").read_text()
    cited = {file for file, _, _ in CITED.findall(page)}
    assert len(cited) > 15
    assert cited == set(re.findall(r"tests/[a-z_/]+test_[a-z_]+\.py", page)), "the names that the Makefile finds"
    for file in cited:
        assert not NOT_IN_CI.search(cited_file(file).read_text()), f"{file} is run by nothing that .ci/run calls"


def missing_in_source(text: str) -> list[str]:
    """The files and folders named in `text` that src/trueline lacks."""
    named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert len(named) > 12
    return [name for name in named if not (ROOT / "src" / "trueline" / name).exists()]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "architecture").glob("*.md")), ids=lambda page: page.stem)
def test_the_files_that_a_walk_passes_exist(page: Path) -> None:
    assert not missing_in_source(page.read_text())


def test_the_answers_to_where_things_are_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert not missing_in_source(text[text.index("## Where things are") : text.index("## Style")])
