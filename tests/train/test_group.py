"""Promises of the process group, each of which was once broken by a stall."""

import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

from trueline.train.group import GlooGroup, start_store

PEER = """
import sys, torch, torch.distributed as dist
from trueline.train.group import GlooGroup
group = GlooGroup()
group.form(2, rank=1, size=2, store=sys.argv[1])
value = torch.ones(1)
dist.all_reduce(value)
print(int(value.item()))
group.close()
"""


def test_the_rendezvous_store_listens_on_the_loopback_alone():
    store, address = start_store()
    port = int(address.rpartition(":")[2])
    listening = [c for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"]
    assert [c.laddr.ip for c in listening] == ["127.0.0.1"]
    del store


def test_a_member_whose_group_failed_to_form_meets_one_that_never_failed(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, address = start_store()
    group = GlooGroup()
    with pytest.raises(RuntimeError):
        group.form(1, rank=0, size=2, store=address)  # nobody comes
    peer = subprocess.Popen([sys.executable, "-c", PEER, address], stdout=subprocess.PIPE, text=True)
    while True:
        try:
            group.form(2, rank=0, size=2, store=address)
            break
        except RuntimeError:  # the peer is still importing torch
            assert peer.poll() is None
    value = torch.ones(1)
    dist.all_reduce(value)
    assert peer.communicate()[0] == "2\n"
    assert value.item() == 2
    group.close()
    del store


def test_a_cut_fails_a_pending_operation_at_once_and_leaves_other_sockets_alone(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, address = start_store()
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "from trueline.train.group import GlooGroup, start_store\n"
        "group = GlooGroup(); other, where = start_store()\n"
        "group.form(1, rank=1, size=2, store=sys.argv[1])\n"
        "print('formed', flush=True); sys.stdin.readline()\n"
    )
    peer = subprocess.Popen(
        [sys.executable, "-c", code, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    group = GlooGroup()
    while True:
        try:
            group.form(1, rank=0, size=2, store=address)
            break
        except RuntimeError:  # the peer is still importing torch
            assert peer.poll() is None
    assert peer.stdout.readline() == "formed\n"
    work = dist.all_reduce(torch.ones(1), async_op=True)  # the peer never takes part
    assert group.cut() >= 1
    with pytest.raises(RuntimeError):
        work.wait()
    group.close()
    assert group.cut() == 0
    store.set("still", "there")
    assert store.get("still") == b"there"
    peer.communicate("\n")
