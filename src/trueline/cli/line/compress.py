"""`trueline compress`."""

import os
from pathlib import Path
from typing import Any

import click

from trueline.cli.options import Output, checkpoint_path, overwrite_option, verb
from trueline.compress.method import BY_DEFAULT, MINUTES, TARGETS

_EXAMPLES = """
trueline compress digits.bundle --budget accuracy=1% --target latency
    tries ways to quantize, and seals the fastest that loses at most 0.01 of the accuracy: digits-latency.bundle

trueline compress digits.bundle --budget accuracy=1% --target size --minutes 5 --recipe digits/recipe.py
    the smallest, in five minutes; the recipe has the evaluation records

trueline compress digits.bundle --prune channels=0.3 --quantize static
    removes channels, trains further with the recipe, captures, quantizes

trueline compress digits.bundle --prune channels=0.3,heads=0.25 --prune channels=0.5 --rounds 3 --budget accuracy=1%
    two smaller models, each pruned in three parts with training after each; they and their quantized forms compete

trueline compress digits.bundle --distill student/recipe.py --budget accuracy=1%
    trains the student on the bundle's answers; it, its quantized forms and the bundle's compete

trueline compress digits.bundle --drop 0.5 --prune heads=0.25 --qat --quantize static
    a chain: a student of half of the layers, without a quarter of its heads, trained for int8, quantized

trueline compress digits.bundle --drop 0.5 --match encoder.layers.2=encoder.layers.5 --quantize static
    every second layer, taught by the whole model's answers and by what its layer 5 returns

trueline compress digits.bundle --qat --quantize static
    trains further as int8 kernels compute, captures, quantizes

trueline compress digits.bundle --quantize static --quantize dynamic -o small.bundle
    the faster of the two, whatever it loses: the report says how much
"""


@verb("compress", examples=_EXAMPLES, shows_progress=True, first=("budget", "target", "out"))
@click.argument("bundle")
@click.option("--budget", metavar="METRIC=N%", help=f"How much may be lost of a metric.  [default: {BY_DEFAULT}]")
@click.option("--target", type=click.Choice(TARGETS), default="latency", show_default=True, help="What to make small.")
@click.option("-o", "--out", metavar="BUNDLE", help="The bundle to write; else NAME-TARGET.bundle beside BUNDLE.")
@click.option("--recipe", metavar="RECIPE", help="Has the records; else looked for by the digest in the lineage.")
@click.option(
    "--quantize",
    multiple=True,
    metavar="WAY",
    help="A way by hand: static, dynamic, openvino, weights, float16, bfloat16, inductor.",
)
@click.option(
    "--prune", multiple=True, metavar="PART=SHARE",
    help="conv=0.2,linear=0.4: zero weights; channels=0.3,heads=0.25,experts=0.5: fewer of them. Several compete.",
)  # fmt: skip
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Parts in which is pruned, with training between them.",
)
@click.option("--distill", metavar="RECIPE", help="Train this student on the bundle's answers.")
@click.option("--drop", metavar="[STACK=]SHARE", help="A ready student: the model without this share of its layers.")
@click.option(
    "--match", multiple=True, metavar="STUDENT=TEACHER", help="A submodule of the student learns another's outputs."
)
@click.option(
    "--distill-loss", metavar="NAME", help="NAME(outputs, answers) in the student's recipe: the distance it learns by."
)
@click.option("--qat", is_flag=True, help="Train further with weights and inputs rounded to int8.")
@click.option("--checkpoint", metavar="CHECKPOINT", help="Further training starts with it; else found by its digest.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), metavar="N",
    help=f"Limit for all of it. Else {MINUTES:g} for candidates, after what is trained.",
)  # fmt: skip
@overwrite_option
def command(bundle: str, checkpoint: str | None, **options: Any) -> Output:
    """Make a bundle smaller or faster, within a budget.

    Quantizes the bundle's ONNX program in several ways, for ONNX Runtime and OpenVINO, and measures every candidate
    on the recipe's evaluation records and on this machine: the metric with its confidence bound, changed decisions,
    latency, throughput, size and memory, against the parent in the same runtime and against the eager model. What
    is not really quantized, not better or over the budget is not offered. The best is sealed as a bundle like any
    other, whose golden records have the tolerance that was accepted. If none keeps the budget, nothing is sealed
    and the table says why (exit code 1).

    A command that was killed continues where it was: typed again, it finds the candidates in BUNDLE.search.
    """
    from trueline.compress.api import compress

    # Before torch is imported: threads of the eager model that wait would take the processor from what is timed beside.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    start = checkpoint_path(checkpoint) if checkpoint else None
    compressed = compress(Path(bundle), checkpoint=start, **options)
    return Output(compressed.as_text(), compressed.as_dict())
