"""The doctor's report as a page is read on a narrow screen, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueline.doctor.report import Cause, Diagnosis, Rewrite, Row, page
from worlds import browser

REWRITE = Rewrite(
    class_name="Gate",
    file="recipe.py",
    steps=("`if x.sum() > 0` runs one way with torch.cond",),
    diff="--- a/recipe.py\n+++ b/recipe.py\n-    if x.sum() > 0:\n+    return torch.cond(x.sum() > 0, a, b, (x,))",
    probes=32,
    max_abs_error=0.0,
    onnx="proven",
)
CAUSE = Cause(
    kind="value branch", file="recipe.py", line=12, source="if x.sum() > 0:", words="it branches on values: " + "x" * 90
)


def row(path: str, **told: object) -> Row:
    facts: dict[str, object] = {
        "class_name": "Sequential", "status": "ready", "traceable": True, "scriptable": True, "exportable": True,
        "cause": None, "rewrite": None, "why_not": "",
    }  # fmt: skip
    return Row(path=path, **(facts | told))


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.WHY_NOT)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_the_whole_report_is_seen_at_any_width(tmp_path: Path, width: int, dark: bool) -> None:
    rows = (
        row("encoder.a_block_with_a_rather_long_name.0"),
        row("gate", class_name="Gate", status="rewritten", exportable=False, cause=CAUSE, rewrite=REWRITE),
        row("loop", class_name="Loop", status="blocked", exportable=False, cause=CAUSE, why_not="none is proven"),
    )
    (tmp_path / "doctor.html").write_text(page(Diagnosis(recipe="gated", rows=rows, before=None)))
    with browser.browser(tmp_path / "browser") as opened:
        opened.open((tmp_path / "doctor.html").as_uri(), width=width, dark=dark)
        opened.until("document.querySelectorAll('td').length === 18")
        cut = opened.ask(
            "[...document.querySelectorAll('td, th, p, h1, h2')]"
            ".filter((one) => one.getBoundingClientRect().right > innerWidth).map((one) => one.textContent)"
        )
        assert cut == []
        assert not opened.complaints
