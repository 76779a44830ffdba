"""Masters that follow one another: by whom they are forked, how an end is told, and that nobody is left."""

import json
import os
import signal
import socket

import psutil
import pytest

from trueline.errors import TrainError
from trueline.train import settings
from trueline.train.job_dir import JobDir
from trueline.train.master.failover import MasterProcess, reserve_port
from worlds.waiting import until, until_ended


class Line:
    """A job's folder, a lifeline, and the masters of both."""

    def __init__(self, folder):
        self.folder = folder / "job"
        (self.folder / "logs").mkdir(parents=True)
        job = settings.JobSettings(
            name="job", recipe="none.py", recipe_digest="", workers=1, epochs=1, global_batch=4, seed=0
        )
        settings.save(job, self.folder)
        (self.folder / "secret").write_text("secret")
        self.life, self.end_of_life = os.pipe()
        arguments = [str(self.folder), "--agent", str(folder / "no agent")]
        log = self.folder / "logs" / "master.log"
        self.masters = MasterProcess("trueline.train.master.server", arguments, life=self.life, log=log)

    def start(self, port=0):
        """The next master's process, and its port, as soon as it listens."""
        file = self.folder / "master.json"
        file.unlink(missing_ok=True)
        self.masters.start("--port", str(port))

        def listens():
            assert self.masters.poll() is None, (self.folder / "logs" / "master.log").read_text()
            return file.exists()

        until(listens, "the master listens")
        told = json.loads(file.read_text())
        return psutil.Process(told["pid"]), int(told["address"].rpartition(":")[2])

    def cut(self):
        if self.end_of_life >= 0:
            os.close(self.end_of_life)
            self.end_of_life = -1


@pytest.fixture
def line(tmp_path):
    line = Line(tmp_path)
    yield line
    line.cut()
    line.masters.end()
    os.close(line.life)


def test_a_successor_comes_from_the_same_zygote_to_the_same_port_and_the_end_before_is_told(line):
    first, port = line.start()
    zygote = first.parent()
    assert zygote.pid != os.getpid()
    first.kill()
    assert line.masters.wait(200) == -signal.SIGKILL
    assert line.masters.poll() == -signal.SIGKILL  # it is not forgotten
    second, again = line.start(port)
    assert (second.parent(), again) == (zygote, port)
    assert line.masters.poll() is None


def test_a_zygote_forks_with_one_thread_only(line):
    """A second one may hold a lock that the child waits for for ever."""
    master, _ = line.start()
    assert master.parent().num_threads() == 1


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_zygote_that_is_killed_takes_its_master_along_and_another_pair_can_begin(line, stopped):
    master, port = line.start()
    zygote = master.parent()
    if stopped:
        master.send_signal(signal.SIGSTOP)
    zygote.kill()
    assert line.masters.wait(200) == -signal.SIGKILL
    until_ended([master.pid])
    other, again = line.start(port)
    assert other.parent() != zygote
    assert again == port


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_both_end_with_the_lifeline(line, stopped):
    master, _ = line.start()
    zygote = master.parent()
    if stopped:
        zygote.send_signal(signal.SIGSTOP)
        master.send_signal(signal.SIGSTOP)
    line.cut()
    line.masters.end()
    until_ended([master.pid])


def test_a_master_that_cannot_begin_says_so_by_its_exit_code(line):
    (line.folder / "job.json").write_text("{")
    line.masters.start("--port", "0")
    assert line.masters.wait(200) == 1
    assert "job.json" in (line.folder / "logs" / "master.log").read_text()


def bind(address, *options):
    listener = socket.socket()
    for option in options:
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def test_a_reserved_port_is_for_masters_alone_and_takes_no_connection_itself():
    with reserve_port() as reserved:
        address = reserved.getsockname()
        for options in ((), (socket.SO_REUSEADDR,)):  # another user cannot do more, with SO_REUSEPORT either
            with pytest.raises(OSError, match="in use"):
                bind(address, *options)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with bind(address, socket.SO_REUSEADDR, socket.SO_REUSEPORT), socket.create_connection(address) as caller:
            assert caller.getpeername() == address


def test_two_masters_never_serve_one_job_though_they_could_share_its_port(tmp_path):
    folder = JobDir(tmp_path)
    first = folder.hold_master()
    with pytest.raises(TrainError, match="another master of the job"):
        folder.hold_master()
    os.close(first)
    os.close(folder.hold_master())


def test_a_signal_that_comes_while_a_dead_zygote_is_replaced_leaves_nothing_that_cannot_be_ended(line, monkeypatch):
    """A second Ctrl-C, or a second SIGTERM to all processes of the job, raises in the launcher."""
    line.start()
    line.masters._zygote.kill()
    until(lambda: line.masters.poll() is not None, "the launcher has seen that it is gone")

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(line.masters, "_start_zygote", interrupted)
    with pytest.raises(KeyboardInterrupt):
        line.masters.start("--port", "0")
    assert line.masters.poll() is None
    line.cut()
    line.masters.end()
