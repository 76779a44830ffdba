"""The page about a bundle: what was proven stands on it, and nothing in a bundle becomes markup."""

import re
from pathlib import Path

import msgspec
import pytest

from trueline.bundle.evaluation import EvaluationRecord
from trueline.bundle.read import Bundle, open_bundle
from trueline.bundle.report import render
from trueline.cli import app
from worlds import bundles


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundles.double_plus(tmp_path_factory.mktemp("bundle") / "tiny.bundle")


def test_the_page_has_the_signature_every_comparison_and_the_lineage(bundle: Bundle) -> None:
    page = render(bundle)
    for words in (bundle.manifest.digest, "[batch, 3]", "Proven for batch from 1", bundle.manifest.lineage.recipe):
        assert words in page
    for evidence in bundle.evidence():
        assert evidence.probe in page
    assert page.count("<circle") == sum(one.max_rel_error is not None for one in bundle.evidence())
    assert "Training loss" not in page, "no job was named"


def test_the_page_has_no_script_and_loads_nothing_and_a_name_is_never_markup(bundle: Bundle) -> None:
    bundle = Bundle(path=bundle.path, manifest=msgspec.structs.replace(bundle.manifest, name="<script>x</script>"))
    page = render(bundle, losses=[(0, 1.0)])
    assert "&lt;script&gt;x" in page
    assert not re.search(r"<script|(src|href)=|url\(|https?://", page)


def test_a_notebook_shows_a_bundle_as_a_table_and_no_name_as_markup(bundle: Bundle) -> None:
    shown = bundle._repr_html_()
    assert "<th>input</th><td>x FP32 [batch, 3]</td>" in shown
    assert re.search(r"<th>onnx</th><td>proven on \d+ probes, served</td>", shown)
    other = Bundle(path=bundle.path, manifest=msgspec.structs.replace(bundle.manifest, name="<b>"))
    assert "<b>" not in other._repr_html_()


def test_a_loss_curve_leaves_out_what_is_not_finite(bundle: Bundle) -> None:
    page = render(bundle, losses=[(0, 4.0), (1, float("nan")), (2, 2.0)])
    (points,) = re.findall(r'<polyline points="([^"]*)"', page)
    assert len(points.split()) == 2
    assert "step 0<" in page
    assert "step 2<" in page


def test_a_classification_shows_which_class_was_taken_for_which_by_name(bundle: Bundle) -> None:
    found = EvaluationRecord(
        records=9, mode="evaluation", loss=0.5, metrics={"accuracy": 7 / 9}, checkpoint="step-4", checkpoint_digest="x",
        classes=("yes", "<no>"), confusion=((4, 1), (1, 3)),
    )  # fmt: skip
    page = render(bundle, evaluation=found)
    assert re.search(r"<th>yes</th><td[^>]*>4</td><td[^>]*>1</td><td>5</td><td>80.0 %</td>", page)
    assert "<th>&lt;no&gt;</th>" in page
    assert "accuracy 0.7778" in page
    assert "captured from another checkpoint than the one that was evaluated, step-4" in page


def test_a_regression_shows_its_residuals(bundle: Bundle) -> None:
    pairs = ((0.0, 0.5), (1.0, 1.0), (2.0, 1.0))
    page = render(bundle, evaluation=EvaluationRecord(records=3, mode="evaluation", loss=None, pairs=pairs))
    assert "loss not finite" in page
    assert page.count("<title>label ") == 3
    assert "label 2, answer 1</title>" in page


def test_the_command_writes_the_page_with_the_losses_of_a_job(bundle: Bundle, tmp_path: Path) -> None:
    page, log = tmp_path / "page.html", tmp_path / "events.jsonl"
    assert app.run(["bundle", "report", str(bundle.path), "-o", str(page)]) == 0
    assert page.read_text() == render(open_bundle(bundle.path))
    wrong = ["bundle", "report", str(bundle.path), "-o", str(page), "--job", str(tmp_path)]
    assert app.run(wrong) == 2
    fields = '{"step": %d, "records": 4, "loss": %s, "workers": 1}'
    log.write_text(
        "".join(f'{{"name": "step.applied", "fields": {fields % (n, 1 / (n + 1))}, "at": {n}}}\n' for n in (0, 1))
    )
    assert app.run(wrong) == 0
    assert 'aria-label="Training loss by step"' in page.read_text()
