"""`trueline bench-serve`."""

from __future__ import annotations

from pathlib import Path

import click

from trueline.cli.options import json_option, say, tracking_option, verb

_EXAMPLES = """
trueline bench-serve digits.bundle
    how long runs take by rows, and the best batch size and delay for 32 clients that ask as fast as they are answered

trueline bench-serve digits.bundle --per-second 500 --max-batch 32 --json
    for strangers who ask 500 times a second together; for a script
"""


@verb("bench-serve", examples=_EXAMPLES)
@click.argument("bundle")
@click.option("--clients", type=click.IntRange(min=1), help="Clients that ask again once answered; 32 if left out.")
@click.option("--per-second", type=float, metavar="RATE", help="Requests per second of strangers, instead of clients.")
@click.option("--max-batch", type=int, default=64, show_default=True, help="Records that are run together at most.")
@click.option("--program", default="", metavar="FORMAT", help="Run this of a bundle's programs, not the one it names.")
@click.option("--threads", type=int, default=1, show_default=True, metavar="N", help="Threads of one run.")
@tracking_option
@json_option
def command(
    bundle: str,
    clients: int | None,
    per_second: float | None,
    max_batch: int,
    program: str,
    threads: int,
    tracking_uri: str | None,
    as_json: bool,
) -> None:
    """Measure a bundle's runs and find the best settings for them.

    The server needs none: it learns when to wait and how much to run at once. This says what it could reach, and
    what to set where settings are wanted. BUNDLE is a folder, a packed file, or a registered model.
    """
    from trueline.errors import UsageError
    from trueline.serve.batching import benchmark
    from trueline.serve.batching.simulator import Load

    if clients is not None and per_second is not None:
        raise UsageError("--clients and --per-second are two kinds of load; give one")
    path = Path(bundle)
    if bundle.startswith("models:"):
        from trueline.registry import resolve

        path = resolve(bundle, tracking_uri=tracking_uri).path
    load = Load(per_second=per_second) if per_second is not None else Load(clients=clients or 32, think_s=2e-4)
    found = benchmark.bench_serve(path, load=load, max_batch=max_batch, threads=threads, program=program)
    say(benchmark.as_text(found), benchmark.as_dict(found), as_json=as_json)
