"""Where servers listen, and connections to them: each side proves that it has the job's secret before the first frame.

    caller: greeting with a nonce ──▶
                                     ◀── listener: nonce, HMAC("listener", greeting, nonce, address)
    caller: HMAC("caller", greeting, nonce, address) ──▶
                                     ◀── one byte: the proof is right

On a Unix socket a descriptor of memory to share may come with the proof; the last byte says whether the listener
takes it. HMAC-SHA256 (RFC 2104) of both nonces, of the role, and of the address that the caller dialled, so that
nothing can be replayed, reflected or passed on. The secret is never sent. A listener holds no memory for a caller that
has not proven it.
"""

import hmac
import os
import secrets
import socket
from pathlib import Path

import msgspec

from trueline.ps.wire import FrameError

NONCE, MAC = 32, 32
ACCEPTED, SHARED = b"\1", b"\2"
_HELLO = b"TLH\1"
GREETING = len(_HELLO) + NONCE
_SOCKET_BUFFER = 4 << 20


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens. `unix`: a path, empty when there is none; `tcp`: HOST:PORT."""

    ref: str
    unix: str
    tcp: str
    pid: int

    @property
    def preferred(self) -> str:
        return self.unix if self.unix and os.path.exists(self.unix) else self.tcp


ADDRESS = "address.json"


def folder_of(job: Path, ref: str) -> Path:
    """The folder of the server `server-SLOT`, the same in each incarnation."""
    return job / "ps" / ref


def read_address(job: Path, ref: str) -> ServerAddress | None:
    """Where the server with this ref, such as `server-0`, listens; None before it has begun."""
    try:
        return msgspec.json.decode((folder_of(job, ref) / ADDRESS).read_bytes(), type=ServerAddress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def short_path(path: str) -> tuple[str, int]:
    """A name of the socket `path` that fits sockaddr_un's 108 bytes, and a descriptor to close after its use."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{os.path.basename(path)}", folder


def set_options(connection: socket.socket) -> None:
    """Large buffers on a Unix socket; TCP sizes its own, and must not wait for more to send."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def dial(address: str, secret: bytes, timeout_s: float, share: int = -1) -> tuple[socket.socket, bool]:
    """A connection to the server at `address`, a path or HOST:PORT, proven by both sides, in blocking mode; and whether
    the server shares the memory with descriptor `share`, if one was given.

    Raises OSError when no server listens, FrameError when it does not have the secret or refuses this one.
    """
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name, folder = short_path(address)
        connection.settimeout(timeout_s)
        try:
            connection.connect(name)
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(folder)
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    try:
        set_options(connection)
        hello = make_greeting()
        connection.sendall(hello)
        proof = answer_challenge(secret, address, hello, _receive(connection, NONCE + MAC))
        if share >= 0 and connection.family == socket.AF_UNIX:
            proof = proof[socket.send_fds(connection, [proof], [share]) :]
        connection.sendall(proof)
        accepted = _receive(connection, 1)
        if accepted not in (ACCEPTED, SHARED):
            raise FrameError(f"the server at {address} refuses the secret")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, accepted == SHARED


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise FrameError("the server closed the connection: it has another secret, or it is ending")
        data += more
    return data


def make_greeting() -> bytes:
    return _HELLO + secrets.token_bytes(NONCE)


def challenge(secret: bytes, address: str, greeting: bytes) -> tuple[bytes, bytes]:
    """The listener's answer to a greeting, and the proof that it expects. Raises FrameError for another protocol."""
    if not greeting.startswith(_HELLO):
        raise FrameError("a caller speaks another protocol")
    nonce = secrets.token_bytes(NONCE)
    transcript = greeting + nonce + address.encode()
    return nonce + _prove(secret, b"listener", transcript), _prove(secret, b"caller", transcript)


def answer_challenge(secret: bytes, address: str, greeting: bytes, answer: bytes) -> bytes:
    """The caller's proof. Raises FrameError when the listener's is wrong."""
    transcript = greeting + answer[:NONCE] + address.encode()
    if not hmac.compare_digest(answer[NONCE:], _prove(secret, b"listener", transcript)):
        raise FrameError(f"the process at {address} does not have the secret of this job")
    return _prove(secret, b"caller", transcript)


def _prove(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"trueline ps " + role + b"\0" + transcript, "sha256")
