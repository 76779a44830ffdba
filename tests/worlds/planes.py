"""A plane for tests: sums host memory over sockets, in its own thread.

Like NCCL's it does not report whether a sum was ended by an abort: it then writes NaN over a part of the value and
reports that the sum is done. Each plane records its creation and its outcome in the folder `TRUELINE_PLANES`.
"""

import os
import queue
import socket
import struct
import threading
from pathlib import Path

import torch

LENGTH = struct.Struct("!Q")


def connect(store, rank, size, patience):
    return Plane(store, rank, size, patience.total_seconds())


def alone(store, rank, size, patience):
    """Its members never connect."""
    raise RuntimeError("no cable")


class Plane:
    """Rank 0 is connected to each other member, adds their values in the order of ranks, and sends the sum."""

    def __init__(self, store, rank, size, patience_s):
        self.rank, self.size = rank, size
        self.aborted = threading.Event()
        self.todo = queue.SimpleQueue()
        self.peers = {}
        if rank == 0:
            listener = socket.create_server(("127.0.0.1", 0), backlog=size)
            store.set("address", str(listener.getsockname()[1]))
            listener.settimeout(patience_s)
            for _ in range(size - 1):
                peer, _ = listener.accept()
                self.peers[LENGTH.unpack(read(peer, LENGTH.size))[0]] = peer
            listener.close()
        else:
            self.peers[0] = socket.create_connection(("127.0.0.1", int(store.get("address"))), timeout=patience_s)
            self.peers[0].sendall(LENGTH.pack(rank))
        for peer in self.peers.values():
            peer.settimeout(None)
        self.note("made")
        threading.Thread(target=self.work, name="plane", daemon=True).start()

    def note(self, what):
        if "TRUELINE_PLANES" in os.environ:
            with (Path(os.environ["TRUELINE_PLANES"]) / "notes").open("a") as notes:
                notes.write(f"{what} {self.size}\n")

    def sum(self, value):
        begun = Sum()
        self.todo.put((value, begun))
        return begun

    def abort(self):
        if self.aborted.is_set():
            return
        self.aborted.set()
        for peer in self.peers.values():
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # its peer has closed it
        self.todo.put(None)

    def work(self):
        while not self.aborted.is_set():
            task = self.todo.get()
            if task is None:
                break
            value, begun = task
            try:
                value.copy_(self.added(value))
            except OSError:
                value.view(-1)[: max(1, value.numel() // 2)] = float("nan")
                self.note("lost")
                self.aborted.wait()  # without an abort such a sum is never over
            begun.done.set()
        while not self.todo.empty():
            task = self.todo.get()
            if task is not None:
                task[0].fill_(float("nan"))
                task[1].done.set()

    def added(self, value):
        mine = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if self.rank != 0:
            self.peers[0].sendall(mine)
            return as_tensor(read(self.peers[0], len(mine)), value)
        total = value.clone()
        for _, peer in sorted(self.peers.items()):
            total += as_tensor(read(peer, len(mine)), value)
        answer = total.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for peer in self.peers.values():
            peer.sendall(answer)
        return total


class Sum:
    def __init__(self):
        self.done = threading.Event()

    def over(self):
        return self.done.is_set()


def as_tensor(data, like):
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)


def read(peer, size):
    found = bytearray()
    while len(found) < size:
        piece = peer.recv(size - len(found))
        if not piece:
            raise ConnectionResetError("a peer is gone")
        found += piece
    return bytes(found)
