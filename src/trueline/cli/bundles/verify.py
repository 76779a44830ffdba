"""`trueline bundle verify`."""

from __future__ import annotations

from pathlib import Path

import click

from trueline.cli.options import checkpoint_path, json_option, say, verb

_EXAMPLES = """
trueline bundle verify digits.bundle
    golden examples and fresh probes on this machine; exit code 1 when a program fails

trueline bundle verify digits.bundle --against digits/recipe.py --checkpoint runs/digits-1 --seed 7
    every program against the eager model once more, on probes made from seed 7
"""


@verb("verify", examples=_EXAMPLES)
@click.argument("bundle")
@click.option("--against", metavar="RECIPE", help="The recipe whose model is the oracle.")
@click.option("--checkpoint", metavar="CHECKPOINT", help="With --against: the parameters, a checkpoint or a job.")
@click.option("--format", "format_", metavar="NAME", help="One program; all if left out.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the probes; 0 asks those of the capture. [default: 1]")
@click.option("--native", is_flag=True, help="Open machine code too (aotinductor), which runs it: you trust its maker.")
@json_option
def command(
    bundle: str,
    against: str | None,
    checkpoint: str | None,
    format_: str | None,
    seed: int | None,
    native: bool,
    as_json: bool,
) -> int:
    """Prove a bundle again, on this machine.

    Every file is verified against its digest, the golden examples are replayed through each program, and probes are
    made anew and asked: of the recipe's eager model with --against, else of the program that is served. Nothing in
    the bundle is run as code; machine code is left out, unless --native is given. All other programs are looked at,
    and the exit code is 1 when one of them fails.
    """
    from trueline.capture.verify import FRESH_SEED, verify

    found = verify(
        Path(bundle),
        against=against,
        checkpoint=checkpoint_path(checkpoint) if checkpoint else None,
        format=format_,
        seed=FRESH_SEED if seed is None else seed,
        native=native,
    )
    lines = [
        f"{one.format}: holds ({one.golden} golden examples, {one.probes} probes, max error {one.max_abs_error:.2g})"
        if one.holds
        else f"{one.format}: FAILS: {one.why}"
        for one in found.programs
    ]
    lines += [f"note: {note}" for note in found.notes]
    say("\n".join([*lines, f"against the {found.against}, seed {found.seed}"]), found.as_dict(), as_json=as_json)
    return 0 if found.holds else 1
