"""`trueline serve`."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from trueline import events
from trueline.cli.options import section, setting_options, verb
from trueline.serve.settings import ServeSettings

_EXAMPLES = """
trueline serve digits.bundle
    serves it on 127.0.0.1:8080 after replaying its golden records

trueline serve models:/digits@champion --name digits --port 9000
    serves the version that the alias points to, and the next one when it moves

trueline serve s3://models/digits.tlb#sha256:5f0c...
    serves a bundle of an object store, if it has this digest

trueline serve digits.bundle --program openvino
    serves another of its proven programs, which replays the golden records

trueline serve --model-store bundles --load all --state served.json
    serves every bundle of a folder; port 8081 adds versions, sets the default and retires them, and a restart
    brings them back

trueline serve --model-store archives --load all --allow-code
    serves TorchServe's .mar archives with their own handlers, in separate processes

trueline serve --ts-config config.properties --allow-code
    serves what TorchServe served with this configuration, on the same ports
"""


@verb("serve", examples=_EXAMPLES, shows_progress=True, first=("port", "host", "name", "key_file", "model_store"))
@click.argument("source", required=False)
@setting_options(ServeSettings)
@section("TorchServe")(
    "--ts-config", metavar="FILE", help="TorchServe's config.properties; options given here override it."
)
@click.pass_context
def command(ctx: click.Context, /, source: str | None, ts_config: str | None, **given: Any) -> None:
    """Answer requests from bundles until Ctrl-C or SIGTERM.

    Replays a bundle's golden records on this machine first; a version that fails them takes no
    request. Speaks the Open Inference Protocol (/v2, with Triton's extensions), KServe's V1 (/v1), and TorchServe's
    inference and management APIs. SOURCE is a bundle, its URL in an object store, or a
    registered model, models:/NAME@ALIAS or models:/NAME/VERSION. --json prints one line when the server is ready: its
    addresses, model, version and digest.
    """
    from trueline.serve.api import serve

    certificate = str(given["certificate"] or "")
    ready: Callable[..., None] = partial(_print_curl, given["key_file"], certificate)
    if ctx.params["as_json"] or ctx.params["quiet"]:
        ready = _print_ready if ctx.params["as_json"] else _print_nothing
    with events.listening(ready):
        if ts_config is not None:
            given = _apply_config(ctx, ts_config, given)
        if given["management_port"] is None and (given["model_store"] or given["workflow_store"]) is not None:
            given["management_port"] = 8081
        serve(source, **given)


def _print_ready(name: str, fields: Mapping[str, events.Field]) -> None:
    if name == "server.ready":
        click.echo(json.dumps(fields))


def _print_nothing(name: str, fields: Mapping[str, events.Field]) -> None:
    """--quiet."""


def _print_curl(key_file: str | None, certificate: str, name: str, fields: Mapping[str, events.Field]) -> None:
    from trueline.serve.models.example import curl_line

    if name != "server.ready":
        return
    url, model = fields.get("url"), fields.get("model")
    if url is None:  # another process of this server listens
        return
    lines = [f"\n  ready: {url}{f' serves {model}' if model else ''}; try it in a browser at {url}/try"]
    example = str(fields.get("example", ""))
    if line := curl_line(str(url), str(model), example, token=key_file is not None, certificate=certificate):
        lines += ["  or ask it the question that its proof asked:\n", f"{line}\n"]
    if key_file is not None:
        lines += [f'  TOKEN is the key of "inference" in {key_file}']
    click.echo("\n".join(lines), err=True)


def _apply_config(ctx: click.Context, path: str, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, completed by the file: the environment overrides the command line, which overrides the file."""
    from trueline.torchserve import config

    read = config.read(Path(path), os.environ)
    for key, why in read.ignored:
        events.emit("config.ignored", key=key, why=why)
    default = click.core.ParameterSource.DEFAULT
    typed = {name for name in ctx.params if ctx.get_parameter_source(name) is not default}
    return given | read.options | {name: value for name, value in given.items() if name in typed} | read.forced
