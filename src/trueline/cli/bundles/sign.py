"""`trueline bundle sign`."""

from __future__ import annotations

from pathlib import Path

import click

from trueline.cli.options import json_option, say, verb

_EXAMPLES = """
trueline bundle sign digits.bundle --key key.pem
    writes digits.bundle.sig beside it, for servers that are started with --trusted-keys

trueline bundle sign store/resnet.mar --key key.pem
    the same for a model archive of TorchServe's
"""


@verb("sign", examples=_EXAMPLES)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--key", required=True, metavar="FILE", help="Ed25519 private key, a PEM file without a password.")
@json_option
def command(path: Path, key: str, as_json: bool) -> None:
    """Vouch for a bundle or an archive with a signature.

    It is verified first: what is torn or was changed is not signed. The signature is of its digest, which covers every
    byte. `trueline serve --trusted-keys FILE` serves only what is signed by one of the public keys in FILE.
    """
    from trueline.bundle.signing import beside
    from trueline.torchserve.signing import sign

    place = sign(path, key)
    say(f"{place}", {"path": str(place), "signature": beside(path)}, as_json=as_json)
