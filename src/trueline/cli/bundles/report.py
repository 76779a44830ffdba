"""`trueline bundle report`."""

from pathlib import Path

import click

from trueline.cli.options import Output, tracking_option, verb

_EXAMPLES = """
trueline bundle report digits.bundle
    writes digits.html: signature, proven range, every comparison, lineage

trueline bundle report models:/digits@champion --job runs/digits-1 -o digits.html
    a registered bundle, with the loss curve of the job that trained it and what `trueline evaluate` found
"""


@verb("report", examples=_EXAMPLES)
@click.argument("bundle")
@click.option(
    "--job", type=click.Path(path_type=Path), metavar="JOB", help="Add loss curve and evaluation of this job."
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The page; by default NAME.html in this folder.")
@tracking_option
def command(bundle: str, job: Path | None, out: Path | None, tracking_uri: str | None) -> Output:
    """Write one HTML page about a bundle.

    The page has the inputs and outputs, the proven range in words, the programs and what was tried, a plot of the
    errors of all comparisons with the eager model, the golden records and the lineage; with --job the loss curve and
    the last evaluation: a confusion matrix, or residuals. It is one file without scripts that loads nothing. Every
    file of the bundle is verified against its digest first.
    """
    from trueline import files
    from trueline.bundle import evaluation
    from trueline.bundle.read import open_bundle
    from trueline.bundle.report import render

    path = Path(bundle)
    if bundle.startswith("models:"):
        from trueline.registry import resolve

        path = resolve(bundle, tracking_uri=tracking_uri).path
    opened = open_bundle(path)
    page = out or Path(f"{opened.manifest.name}.html")
    losses = [] if job is None else _read_losses(job)
    found = None if job is None else evaluation.read(job)
    files.write_atomic(page, render(opened, losses=losses, evaluation=found).encode())
    return Output(str(page), {"page": str(page), "digest": opened.manifest.digest})


def _read_losses(job: Path) -> list[tuple[int, float]]:
    """Steps and losses as the job's page shows them: of a long job, means of adjacent steps."""
    from trueline.errors import UsageError
    from trueline.train.job_dir import parse_events
    from trueline.train.monitor.job_view import JobView

    try:
        with (job / "events.jsonl").open("rb") as log:
            view = JobView({})
            for event in parse_events(log):
                view.apply(*event)
    except OSError as error:
        raise UsageError(f"--job {job} is not a training job: {error.strerror}", hint="name the job's folder") from None
    columns = view.series.columns()
    pairs = zip(columns["step"], columns["loss"], strict=True)
    return [(int(step), float(loss)) for step, loss in pairs if step is not None and loss is not None]
