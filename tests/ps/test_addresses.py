"""Where servers listen for other hosts, and where the tables of several hosts lie."""

import socket
from dataclasses import replace

import msgspec
import pytest

from trueline.errors import StorageError
from trueline.ps.dial import ADDRESS, ServerAddress, folder_of
from trueline.ps.hybrid.kept import choose_cuts, list_parts
from trueline.ps.server.listen import CallerLines
from trueline.ps.tasks import TasksLink, locate_server
from trueline.train.settings import JobSettings


def open_at(folder, ports):
    lines = CallerLines(b"secret", lambda line, frame: None, lambda line: None)
    try:
        return lines.open(folder, "127.0.0.1", ports)[1]
    finally:
        lines.close()


def test_a_server_takes_a_free_one_of_the_ports_that_a_firewall_lets_through(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as probe:
        busy, free = taken.getsockname()[1], probe.getsockname()[1]
        probe.close()
        assert open_at(tmp_path, [busy, free]) == f"127.0.0.1:{free}"
        with pytest.raises(StorageError, match=f"no port of {busy}-{busy} is free at 127.0.0.1") as caught:
            open_at(tmp_path, [busy])
    assert "--ports" in caught.value.hint


def write_address(job, server, **fields):
    folder = folder_of(job, server)
    folder.mkdir(parents=True)
    address = ServerAddress(ref=f"{server}.0", unix=str(folder / "socket"), tcp="10.0.0.1:7801", pid=1)
    (folder / ADDRESS).write_bytes(msgspec.json.encode(address))


def test_a_worker_of_another_host_is_not_sent_to_a_path_of_this_one(tmp_path):
    write_address(tmp_path, "server-0")
    (tmp_path / "ps" / "server-0" / "socket").touch()
    found = locate_server(tmp_path, "server-0").address
    assert found.preferred == found.tcp == "10.0.0.1:7801"
    assert locate_server(tmp_path, "server-1").address is None


def test_only_a_worker_of_a_joined_host_asks_the_master(tmp_path, monkeypatch):
    write_address(tmp_path, "server-0")
    monkeypatch.setenv("TRUELINE_MASTER", "127.0.0.1:9")
    monkeypatch.setenv("TRUELINE_SECRET", "secret")
    link = TasksLink("worker-0.0")
    monkeypatch.setattr(link, "_call", lambda name, request, *_: locate_server(tmp_path, request.server))
    assert link.find_servers(tmp_path)("server-0").unix
    monkeypatch.setenv("TRUELINE_CA", "ca.pem")
    assert not link.find_servers(tmp_path / "elsewhere")("server-0").unix


def test_tables_lie_where_all_hosts_see_them_and_are_found_by_a_launch_with_or_without_other_hosts(tmp_path):
    own, store = tmp_path / "ps", tmp_path / "store"
    alone = JobSettings(name="job", recipe="r.py", recipe_digest="", workers=1, checkpoints=str(store))
    several = replace(alone, listen="10.0.0.1:7700")
    assert choose_cuts(alone, own) == own / "cuts"
    assert choose_cuts(several, own) == store / "tables"
    for step, (job, other) in enumerate([(alone, several), (several, alone)]):
        folder = choose_cuts(job, own) / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "server-0.part").touch()
        assert list_parts(job, own, step) == list_parts(other, own, step) == (str(folder / "server-0.part"),)
    assert list_parts(alone, own, 9) == ()
