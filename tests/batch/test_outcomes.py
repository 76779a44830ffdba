"""What an evaluation counts beside its means: the same however the records are cut, and kept where the job is."""

from pathlib import Path

import pytest
import torch

from trueline.batch import outcomes
from trueline.batch.evaluate import evaluate
from trueline.bundle import evaluation
from trueline.cli import app
from worlds.jobs import MEASURED, checkpoint_of


def summed(count: outcomes.Outcomes, outputs: torch.Tensor, labels: torch.Tensor, chunk: int) -> dict[str, float]:
    totals: dict[str, float] = {}
    for start in range(0, len(labels), chunk):
        stop = min(start + chunk, len(labels))
        for name, value in count(start, stop, outputs[start:stop], labels[start:stop]).items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_each_record_is_in_the_cell_of_its_label_and_its_answer_however_the_records_are_cut(chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    outputs, labels = torch.randn(64, 3, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    labels[5] = -100  # of no class: such a record does not count
    found = outcomes.confusion(summed(outcomes.make_outcomes(64), outputs, labels, chunk))
    expected = [[0] * 3 for _ in range(3)]
    for label, answer in zip(labels.tolist(), outputs.argmax(1).tolist(), strict=True):
        if label >= 0:
            expected[label][answer] += 1
    assert found == tuple(map(tuple, expected))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_labels_and_answers_are_of_evenly_spaced_records_however_the_records_are_cut(chunk: int) -> None:
    labels = torch.arange(1300, dtype=torch.float64)
    found = outcomes.pairs(summed(outcomes.make_outcomes(1300), labels[:, None] + 0.5, labels, chunk))
    assert found == tuple((float(at), at + 0.5) for at in range(0, 1300, 3))


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 3)),
        (torch.zeros(4, 51), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4, 2), torch.zeros(4, dtype=torch.bool)),
        ({"logits": torch.zeros(4, 2)}, torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4, 5, 7), torch.zeros(4, 5, dtype=torch.int64)),
    ],
)
def test_other_tasks_are_counted_as_nothing(outputs: object, labels: object) -> None:
    assert outcomes.make_outcomes(4)(0, 4, outputs, labels) == {}


def test_an_evaluation_of_a_jobs_checkpoint_is_kept_in_the_job_and_of_another_nowhere(tmp_path: Path) -> None:
    job = tmp_path / "job"
    checkpoint = checkpoint_of(MEASURED, job / "checkpoints")
    first = evaluate(MEASURED, checkpoint, batch=32)
    assert evaluation.read(job) is None, "the folder is no job's"
    (job / "job.json").write_text("{}")
    again = evaluate(MEASURED, checkpoint, batch=50)
    kept = evaluation.read(job)
    assert kept is not None
    assert (kept.records, kept.checkpoint) == (333, "step-00000003")
    assert kept.loss == pytest.approx(first.loss, rel=1e-6)
    assert kept.metrics == pytest.approx(again.metrics)
    assert len(kept.pairs) == 333
    errors = [(answer - label) ** 2 for label, answer in kept.pairs]
    assert sum(errors) / 333 == pytest.approx(kept.loss, rel=1e-5)
    (job / "evaluation.json").write_text("{}")
    assert app.run(["bundle", "report", "x", "--job", str(job)]) != 0
