"""`trueline bundle verify`."""

from pathlib import Path
from typing import Any

import click

from trueline.cli.options import Output, checkpoint_path, verb

_EXAMPLES = """
trueline bundle verify digits.bundle
    golden records and new probes on this machine; exit code 1 when a program fails

trueline bundle verify digits.bundle --against digits/recipe.py --checkpoint runs/digits-1 --seed 7
    every program against the eager model once more, on probes made from seed 7
"""


@verb("verify", examples=_EXAMPLES)
@click.argument("bundle")
@click.option("--against", metavar="RECIPE", help="Compare with this recipe's model.")
@click.option("--checkpoint", metavar="CHECKPOINT", help="With --against: the parameters, a checkpoint or a job.")
@click.option("--format", metavar="NAME", help="Verify one program; else all.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the probes; 0 repeats those of the capture. [default: 1]")
@click.option("--native", is_flag=True, help="Also run machine code (aotinductor): only if you trust its maker.")
def command(bundle: str, checkpoint: str | None, seed: int | None, **options: Any) -> Output:
    """Prove a bundle again, on this machine.

    Verifies every file against its digest, replays the golden records through each program, and compares each program's
    answers to new probes with those of the recipe's eager model (--against), or of the program that is served. Nothing
    in the bundle runs as code; machine code is left out unless --native is given. All programs are compared, and the
    exit code is 1 if one of them fails.
    """
    from trueline.capture.verify import FRESH_SEED, verify

    source = checkpoint_path(checkpoint) if checkpoint else None
    verified = verify(Path(bundle), checkpoint=source, seed=FRESH_SEED if seed is None else seed, **options)
    lines = [
        f"{one.format}: holds ({one.golden} golden records, {one.probes} probes, max error {one.max_abs_error:.2g})"
        if one.holds
        else f"{one.format}: FAILS: {one.why}"
        for one in verified.programs
    ]
    lines += [f"note: {note}" for note in verified.notes]
    lines.append(f"against the {verified.against}, seed {verified.seed}")
    return Output("\n".join(lines), verified.as_dict(), 0 if verified.holds else 1)
