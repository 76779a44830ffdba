"""`trueline bundle sign`."""

from pathlib import Path

import click

from trueline.cli.options import Output, verb

_EXAMPLES = """
trueline bundle sign digits.bundle --key key.pem
    writes digits.bundle.sig beside it, for servers that are started with --trusted-keys

trueline bundle sign store/resnet.mar --key key.pem
    the same for a TorchServe archive
"""


@verb("sign", examples=_EXAMPLES)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--key", required=True, metavar="FILE", help="Ed25519 private key, a PEM file without a password.")
def command(path: Path, key: str) -> Output:
    """Sign a bundle or an archive.

    It is verified first: a damaged or changed one is not signed. The signature is of its digest, which covers every
    byte. `trueline serve --trusted-keys FILE` serves only bundles and archives that one of the public keys in FILE has
    signed.
    """
    from trueline.bundle import signing
    from trueline.torchserve.signing import sign

    place = sign(path, key)
    return Output(str(place), {"path": str(place), "signature": signing.beside(path)})
