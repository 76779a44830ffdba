"""What a page's blocks are for, and when printed text counts as what the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.blocks import blocks_of, output_after
from docs.links import problems
from docs.run import PAGES, ROOT, pages_of, run_page
from docs.shown import difference, json_difference
from trueline.cli._progress import _WORDS
from worlds.waiting import until_ended

PAGE = """# A page

```python title="a/b.py"
print(1)
```

```sh
python a/b.py
```

Some words.

```text
1
```

```toml
a = 1
```

<!-- not run: it needs a cluster -->
```sh
kubectl get pods
```
"""


def test_each_block_has_its_purpose() -> None:
    blocks = blocks_of(Path("p.md"), PAGE)
    assert [block.kind for block in blocks] == ["file", "commands", "output", "illustration", "not run"]
    assert blocks[0].title == "a/b.py"
    assert blocks[4].reason == "it needs a cluster"
    assert output_after(blocks, 1) is blocks[2]
    assert output_after(blocks, 0) is None
    assert [block.line for block in blocks] == [3, 7, 13, 17, 22]


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a\nb", "a\nb\n"),
        ("a\n[...]\nd", "a\nb\nc\nd"),
        ("[...]\nd", "d"),
        ("a\n[...]", "a\nb"),
        ("training 84/276 loss=0.595 [...]", "training 84/276 loss=0.601 workers=3"),
        ("276 steps in 8.8 s", "276 steps in 31.25 s"),
        ("sha256 1b8c26b06e430bae…", "sha256 ffffffffffffffff…"),
        ("largest difference 2.9e-06", "largest difference 4e-07"),
        ("0.5", "0.52"),
    ],
)
def test_what_may_vary_counts_as_shown(shown: str, printed: str) -> None:
    assert difference(shown, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a\nb", "a"),
        ("a", "a\nb"),
        ("a\n[...]\nd", "a\nb\nc"),
        ("276 steps in 8.8 s", "275 steps in 8.8 s"),
        ("0.5", "0.6"),
        ("accuracy 0.99", "accuracy 0.9x"),
        ("largest difference 2.9e-06", "largest difference 2.9e-02"),
        ("every record was applied", "some record was applied"),
    ],
)
def test_anything_else_does_not(shown: str, printed: str) -> None:
    assert difference(shown, printed) is not None


def test_what_only_a_slow_machine_prints_need_not_be_shown() -> None:
    trying = _WORDS["job.trying"].format(what="by 2 losses of record 7", seconds=6.2)
    assert difference("job\ngeneration 1", f"job\n{trying}\ngeneration 1") is None
    assert difference("job\ngeneration 1", "job\n  skipped a: torn\ngeneration 1") is not None


def test_a_json_body_may_be_broken_into_lines() -> None:
    assert json_difference('{"a": [1,\n 2.0]}', '{"a":[1,2.01]}') is None
    assert json_difference('{"a": [1, 2.0]}', '{"a":[1,3.0]}') is not None
    assert json_difference('{"a": "yes"}', '{"a":"no"}') is not None


def page_that(tmp_path: Path, text: str) -> Path:
    path = ROOT / "build" / f"{tmp_path.name}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_page_is_one_terminal(tmp_path: Path) -> None:
    text = '```sh title="a.sh"\necho $X\n```\n```sh\ncd /\nexport X=7\n```\n'
    text += "```sh\npwd\nsh ~/work/a.sh\n```\n```text\n/\n7\n```\n"
    page = page_that(tmp_path, text)
    outcome = run_page(page)
    page.unlink()
    assert not outcome.failure
    assert len(outcome.done) == 4


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("```sh\nfalse\n```\n", "exit status 1"),
        ("```sh\nfalse; true | false\n```\n", "exit status 1"),
        ("```sh\necho a\n```\n```text\nb\n```\n", "the page shows"),
        ("```sh\necho error: a\n```\n```text\nerror: a\n```\n", "exit status 0"),
        ("```sh\nexit 3 &\n```\n```text\nready\n```\n", "ended with exit status 3"),
    ],
)
def test_a_page_that_is_not_so_fails(tmp_path: Path, text: str, failure: str) -> None:
    page = page_that(tmp_path, text)
    outcome = run_page(page)
    page.unlink()
    assert failure in outcome.failure
    assert not outcome.done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kept", "failure"),
    [
        ("print(0.251)\n1 + 1", "0.25\n", ""),
        ("print('a')", "b\n", "the page shows   b"),
        ("1 / 0", "", "ZeroDivisionError"),
    ],
)
def test_a_notebook_prints_what_it_keeps_and_fails_where_a_cell_fails(
    tmp_path: Path, source: str, kept: str, failure: str
) -> None:
    form = pytest.importorskip("nbformat").v4
    cell = form.new_code_cell(source, outputs=[form.new_output("stream", text=kept)] if kept else [])
    page = page_that(tmp_path, json.dumps(form.new_notebook(cells=[cell]))).rename(ROOT / "build" / "a.ipynb")
    outcome = run_page(page)
    page.unlink()
    assert failure in outcome.failure
    assert bool(outcome.failure) is bool(failure)
    assert len(outcome.done) == (not failure)


def test_what_a_page_starts_ends_with_it(tmp_path: Path) -> None:
    text = "```sh\nsleep 100 & echo started $! | tee ~/pid; wait &\n```\n```text\nstarted [...]\n```\n"
    page = page_that(tmp_path, text + "```sh\ncat ~/pid\n```\n```text\nnothing\n```\n")
    outcome = run_page(page)
    page.unlink()
    pid = re.search(r"started (\d+)", outcome.failure)
    assert pid
    until_ended([int(pid[1])])


def test_a_link_that_leads_nowhere_and_a_foreign_load_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x">1</a><a href="b.html#y">2</a><a href="c.html">3</a><a href="https://example.org">4</a>'
        '<img src="d.png"><script src="https://cdn.example.org/a.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="x">')
    assert [line.partition(": ")[2] for line in problems(tmp_path)] == [
        "b.html#y has no such anchor",
        "there is no c.html",
        "there is no d.png",
        "loads https://cdn.example.org/a.js",
    ]


@pytest.mark.parametrize(
    "page", pages_of([place for place in PAGES if (ROOT / place).exists()]), ids=lambda page: page.name
)
def test_a_page_that_is_run_shows_what_each_command_prints_or_nothing(page: Path) -> None:
    """No text stands where a reader would take it for output that nothing compares."""
    for block in blocks_of(page):
        assert block.kind != "illustration" or block.language in ("toml", "diff", ""), block.where
        assert not block.keeps_running or output_after(blocks_of(page), blocks_of(page).index(block)), block.where
