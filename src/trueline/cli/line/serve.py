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
from trueline.cli.options import json_option, quiet_option, setting_options, verb
from trueline.serve.settings import Settings

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
@setting_options(Settings)
@click.option("--ts-config", metavar="FILE", help="TorchServe's config.properties; options given here go first.")
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
    return given | told.options | {name: value for name, value in given.items() if name in typed} | told.forced
