"""The check of the prose finds its words where people read them, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

import prose


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.md", "Fine.\n\nIt waits for\never.\n", [3]),
        ("a.md", "Nobody waits, `nobody` neither.\n", [1]),
        ("a.md", "```\nnobody\n```\n\n    nobody\n", []),
        ("a.md", "# Glossary\n\n## Not used\n\n- nobody\n", []),
        ("a.py", '"""What it is.\n\n    It is told so many things.\n"""\n', [3, 3]),
        ("a.py", "x = 1  # whoever reads this\n", [1]),
        ("a.py", 'raise ValueError("nobody is there")\n', [1]),
        ("a.py", 'nobody = {"nobody": anew}\n', []),
    ],
)
def test_a_word_is_found_in_text_with_its_line_and_not_in_code(
    tmp_path: Path, name: str, text: str, lines: list[int]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert [line for line, _, _ in prose.find_words(path)] == lines


def test_each_word_comes_with_what_to_write_instead(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("It begins anew.")
    assert list(prose.find_words(path)) == [(1, "anew", "again")]
