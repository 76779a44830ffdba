"""`trueline serve`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from trueline import events
from trueline.cli._progress import progress
from trueline.cli.options import json_option, quiet_option, tracking_option, verb

_EXAMPLES = """
trueline serve digits.bundle
    serves it on 127.0.0.1:8080 after its golden examples have been replayed

trueline serve models:/digits@champion --name digits --port 9000
    serves the version that the alias points to, and the next one when it moves

trueline serve s3://models/digits.tlb#sha256:5f0c...
    serves a bundle of an object store, if it is the one of this digest

trueline serve digits.bundle --program openvino
    runs another of its proven programs; golden examples are replayed by what will serve

trueline serve --model-store bundles --load all --state served.json
    serves every bundle of a folder; versions are added, made default and retired on port 8081, and a restart brings
    back what was served

trueline serve --model-store archives --load all --allow-code
    serves TorchServe's .mar archives with their own handlers, in processes of their own

trueline serve --ts-config config.properties --allow-code
    serves what a TorchServe of this configuration served, on the same ports
"""


@verb("serve", examples=_EXAMPLES)
@click.argument("source", required=False)
@click.option("--name", metavar="NAME", help="Name of the model in URLs; the bundle's own if left out.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8080, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--key-file", metavar="FILE", help="Ask for the tokens in FILE (made when missing), e.g. off loopback.")
@click.option("--certificate", metavar="FILE", help="Speak TLS, with the chain in this PEM file.")
@click.option("--private-key", metavar="FILE", help="Its key, if that is in a file of its own.")
@click.option("--client-ca", metavar="FILE", help="Ask clients for a certificate of this authority.")
@click.option("--trusted-keys", metavar="FILE", help="Serve only what one of these public keys has signed.")
@click.option("--cors-origin", default="", metavar="ORIGIN", help="Let pages of this origin, or *, read answers.")
@click.option("--program", default="", metavar="FORMAT", help="Run this of a bundle's programs, not the one it names.")
@click.option("--device", default="", metavar="DEVICE", help="cuda, cuda:1, or OpenVINO's GPU; the CPU if left out.")
@click.option("--precision", default="", metavar="NAME", help="bf16 or fp16, where the runtime computes in it.")
@click.option("--threads", type=int, default=0, metavar="N", help="Threads of one run; 0 leaves it to the server.")
@click.option("--max-batch", type=int, default=64, show_default=True, help="Records that are run together at most.")
@click.option(
    "--max-delay", "max_delay_s", type=float, metavar="SECONDS", help="Wait so long for others; learned if left out."
)
@click.option("--max-queue", type=int, default=256, show_default=True, help="Requests that may wait for the model.")
@click.option("--model-store", metavar="DIR", help="A folder of bundles that may be loaded by name.")
@click.option("--workflow-store", metavar="DIR", help="A folder of TorchServe's workflows; the model store by default.")
@click.option("--load", default="", metavar="NAMES", help="What of the store to load at start: a,b or all.")
@click.option("--watch", is_flag=True, help="Keep what --load names as the store has it, from now on.")
@click.option(
    "--follow",
    "follow_s",
    type=float,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Between looks at the store or the alias; 0: never.",
)
@click.option("--management-port", type=int, metavar="PORT", help="Port to manage versions on; 8081 with a store.")
@click.option("--grpc-port", type=int, metavar="PORT", help="Port of requests over gRPC, in both protocols.")
@click.option("--grpc-management-port", type=int, metavar="PORT", help="Port of TorchServe's management over gRPC.")
@click.option("--metrics-port", type=int, metavar="PORT", help="A further port that answers /metrics alone.")
@click.option("--allow-code", is_flag=True, help="Run the handlers of TorchServe's model archives (.mar).")
@click.option("--handler-memory", type=int, default=0, metavar="MIB", help="Address space of a handler's process.")
@click.option("--torchserve-strict", is_flag=True, help="TorchServe's statuses also where ours are better.")
@click.option("--state", metavar="FILE", help="Remembers what is served, and brings it back at start.")
@click.option("--processes", type=click.IntRange(1, 64), default=1, help="Server processes that share the ports.")
@click.option("--traces", metavar="URL", help="Send OpenTelemetry spans to this collector (OTLP over HTTP).")
@click.option("--access-log", metavar="FILE", help="A line of JSON for each request; `-`: standard error.")
@click.option("--ts-config", metavar="FILE", help="TorchServe's config.properties; options given here go first.")
@tracking_option
@json_option
@quiet_option
@click.pass_context
def command(
    ctx: click.Context, /, source: str | None, ts_config: str | None, as_json: bool, quiet: bool, **given: Any
) -> None:
    """Answer requests from bundles until Ctrl-C or SIGTERM.

    A bundle's golden examples are replayed on this machine first; a version that fails them takes no
    request. Speaks the Open Inference Protocol (/v2, with Triton's extensions), KServe's V1 (/v1), and TorchServe's
    inference and management APIs. SOURCE is a bundle, its URL in an object store, or a
    registered model, models:/NAME@ALIAS or models:/NAME/VERSION. --json prints one line when the server is ready: its
    addresses, model, version and digest.
    """
    from trueline.serve.api import serve

    given["handler_memory_bytes"] = given.pop("handler_memory") * 2**20
    with progress(quiet=quiet), events.listening(_print_ready) if as_json else contextlib.nullcontext():
        if ts_config is not None:
            given = _configured(ctx, ts_config, given)
        if given["management_port"] is None and (given["model_store"] or given["workflow_store"]) is not None:
            given["management_port"] = 8081
        serve(source, **given)


def _print_ready(name: str, fields: Mapping[str, events.Field]) -> None:
    if name == "server.ready":
        click.echo(json.dumps(fields))


def _configured(ctx: click.Context, path: str, given: dict[str, Any]) -> dict[str, Any]:
    """What the command line gives over what the file says, and what the environment says over both."""
    from trueline.torchserve import config

    told = config.read(Path(path), os.environ)
    for key, why in told.ignored:
        events.emit("config.ignored", key=key, why=why)
    default = click.core.ParameterSource.DEFAULT
    typed = {name for name in ctx.params if ctx.get_parameter_source(name) is not default}
    typed |= {"handler_memory_bytes"}  # no key of the file says it
    return given | told.options | {name: value for name, value in given.items() if name in typed} | told.forced
