"""What a host needs to join: the CA of the launch, and a token that the master can check without keeping any.

The token is an expiry and an HMAC under the launch's secret, so one of another job or of an earlier start is refused.
The file holds the certificate too: a host trusts no other, whatever name or address it dials.
"""

import hmac
import sys
import time
from pathlib import Path

import msgspec

from trueline import files
from trueline.errors import UsageError

DAYS = 7
"""How long a token is valid. A host that has joined needs it no more: it has the secret of the launch."""


class TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    token: str
    ca: str
    """PEM."""


def issue_token(secret: str, *, now: float) -> str:
    """A token of the launch with this secret, valid for `DAYS` from `now` (seconds since 1970)."""
    expiry = f"{int(now) + DAYS * 86400}"
    return f"{expiry}.{_sign(secret, expiry)}"


def find_fault(token: str, secret: str, *, now: float) -> str:
    """Why `token` lets no host join; empty: it does."""
    expiry, _, proof = token.partition(".")
    if not hmac.compare_digest(proof.encode(), _sign(secret, expiry).encode()):
        return "the token is wrong: it is of another job, or of an earlier start of this one"
    if now > float(expiry):
        return f"the token expired {time.strftime('%Y-%m-%d %H:%M', time.gmtime(float(expiry)))} UTC"
    return ""


def _sign(secret: str, expiry: str) -> str:
    return hmac.digest(secret.encode(), b"trueline join\0" + expiry.encode(), "sha256").hex()


def write_token(path: Path, content: TokenFile) -> None:
    files.write_atomic(path, msgspec.json.encode(content) + b"\n", mode=0o600)


def read_token(path: Path) -> TokenFile:
    """`-`: one line of stdin. Raises UsageError."""
    try:
        content = sys.stdin.buffer.readline() if str(path) == "-" else path.read_bytes()
        return msgspec.json.decode(content, type=TokenFile)
    except OSError as error:
        raise UsageError(
            f"cannot read the token file {path}: {error.strerror}", hint="copy it from the host that trains"
        ) from error
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} is no token file: {error}", hint="copy the file that the join line of the job names, whole"
        ) from error
