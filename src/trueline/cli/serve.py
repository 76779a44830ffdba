"""`trueline serve`."""

from __future__ import annotations

import click

from trueline.cli._progress import progress
from trueline.cli.options import quiet_option, tracking_option, verb

_EXAMPLES = """
trueline serve digits.bundle
    serves it on 127.0.0.1:8080 after its golden examples have been replayed

trueline serve models:/digits@champion --name digits --port 9000
    serves the version that the alias points to
"""


@verb("serve", examples=_EXAMPLES)
@click.argument("source")
@click.option("--name", metavar="NAME", help="Name of the model in URLs; the bundle's own if left out.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8080, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--allow-remote", is_flag=True, help="Listen on an address that other machines reach.")
@click.option("--threads", type=int, default=0, metavar="N", help="Threads of one run; 0 leaves it to the server.")
@click.option("--max-batch", type=int, default=64, show_default=True, help="Records that are run together at most.")
@click.option("--max-delay", type=float, default=0.0, metavar="SECONDS", help="How long a request waits for others.")
@click.option("--max-queue", type=int, default=256, show_default=True, help="Requests that may wait for the model.")
@tracking_option
@quiet_option
def command(
    source: str,
    name: str | None,
    host: str,
    port: int,
    allow_remote: bool,
    threads: int,
    max_batch: int,
    max_delay: float,
    max_queue: int,
    tracking_uri: str | None,
    quiet: bool,
) -> None:
    """Answer requests from a bundle until Ctrl-C or SIGTERM.

    The bundle's golden examples are replayed on this machine first; a version that fails them takes no
    request. Speaks the Open Inference Protocol (/v2) and TorchServe's inference API. SOURCE is a bundle, or a
    registered model, models:/NAME@ALIAS or models:/NAME/VERSION.
    """
    from trueline.serve.api import serve

    with progress(quiet=quiet):
        serve(
            source,
            name=name,
            host=host,
            port=port,
            allow_remote=allow_remote,
            threads=threads,
            max_batch=max_batch,
            max_delay_s=max_delay,
            max_queue=max_queue,
            tracking_uri=tracking_uri,
        )
