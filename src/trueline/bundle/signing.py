"""Signs bundles: an Ed25519 signature of the digest, in a file beside the bundle.

    digits.bundle          its digest covers every byte of it
    digits.bundle.sig      one line: the form, the key's id, the signature

A digest shows that a bundle is whole, not its maker: anyone who can write to a store can seal one. A server with public
keys serves only bundles that one of them has signed. Source: RFC 8032; keys are PEM files, as openssl writes them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trueline import files
from trueline.errors import BundleError, UsageError, join_names

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SUFFIX = ".sig"
_FORM = "trueline-signature-1"
_PREFIX = b"trueline bundle "
"""Before the digest, so that a signature for another purpose is invalid here."""
MAX_BYTES = 4096
"""Longest signature that is read."""
_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)


def place_of(path: Path) -> Path:
    """The signature's file for the bundle or archive at `path`.

    >>> place_of(Path("store/digits.bundle")).as_posix()
    'store/digits.bundle.sig'
    """
    return path.with_name(path.name + SUFFIX)


def make_signature(digest: str, key: Path) -> str:
    """The signature of `digest` by the private key in `key`. Raises UsageError for a file that is no such key."""
    private = _read_private(key)
    signature = base64.b64encode(private.sign(_PREFIX + digest.encode())).decode()
    return f"{_FORM} {_id_of(private.public_key())} {signature}\n"


def sign(path: Path, digest: str, key: Path) -> Path:
    """Signs the bundle or archive at `path`; returns the signature's file. Raises UsageError, StorageError."""
    place = place_of(path)
    files.write_atomic(place, make_signature(digest, key).encode())
    return place


def beside(path: Path) -> str | None:
    """The signature beside `path`; None if there is none."""
    try:
        with place_of(path).open("rb") as file:
            return file.read(MAX_BYTES).decode("ascii", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"cannot read the signature {place_of(path)}: {error.strerror}") from error


class Trusted:
    """Public keys whose signatures count, by their ids."""

    def __init__(self, keys: Mapping[str, Ed25519PublicKey]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, path: Path) -> Trusted:
        """The public keys in a PEM file. Raises UsageError."""
        _check_installed()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            found = [load_pem_public_key(block.encode()) for block in _PEM.findall(path.read_text("ascii"))]
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} holds no public keys: {error}", hint=_HINT) from error
        keys = {_id_of(one): one for one in found if isinstance(one, Ed25519PublicKey)}
        if not keys or len(keys) < len(found):
            raise UsageError(f"{path} is to hold Ed25519 public keys in PEM, each once, and nothing else", hint=_HINT)
        return cls(keys)

    def check(self, what: str, digest: str, signature: str | None) -> None:
        """Raises BundleError unless `signature` is of `digest` by a trusted key."""
        if signature is None:
            raise BundleError(
                f"{what} is not signed, and this server needs a signature by a trusted key",
                hint=f"`trueline bundle sign` writes its signature beside it ({SUFFIX}); copy both",
            )
        from cryptography.exceptions import InvalidSignature

        form, _, rest = signature.strip().partition(" ")
        name, _, text = rest.partition(" ")
        key = self._keys.get(name)
        if form != _FORM or key is None:
            raise BundleError(
                f"{what} is signed by no key that is trusted here (trusted: {join_names(sorted(self._keys))})",
                hint="sign it with one of these keys, or add its signer's public key",
            )
        try:
            key.verify(base64.b64decode(text, validate=True), _PREFIX + digest.encode())
        except (InvalidSignature, binascii.Error) as error:
            raise BundleError(
                f"the signature of {what} is not one of its digest {digest[:12]} by key {name}",
                hint="one of the two was replaced after the signing: sign it again, if it is the right one",
            ) from error


_HINT = "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out key.pub"


def _id_of(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _read_private(path: Path) -> Ed25519PrivateKey:
    _check_installed()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        found = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} holds no private key: {error}", hint=_HINT) from error
    if not isinstance(found, Ed25519PrivateKey):
        raise UsageError(f"{path} is to hold an Ed25519 private key in PEM", hint=_HINT)
    return found


def _check_installed() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError("signatures need cryptography, which is not installed", hint="pip install 'trueline[sign]'")
