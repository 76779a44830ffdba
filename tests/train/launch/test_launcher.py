"""What a launcher finds of the one before it."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
import msgspec
import pytest

from trueline.errors import UsageError
from trueline.train import settings
from trueline.train.job_dir import LaunchRecord
from trueline.train.launch import launcher
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

WAIT_S = 100
"""Nothing here ends by waiting; a machine may be slow."""


@pytest.fixture
def left(tmp_path):
    """A process of an earlier launch that is stopped, and the folder that it names."""
    scratch = tmp_path / "trueline-before"
    scratch.mkdir()
    code = "import sys; print('here', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(scratch / "agent")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"  # before its exec is over it has no command line to be known by
    process.send_signal(signal.SIGSTOP)
    yield process, scratch
    process.kill()
    process.communicate()


def test_what_a_killed_launcher_left_stopped_is_ended_by_the_next_one(left):
    process, scratch = left
    launcher._kill_leftovers(LaunchRecord(pid=1, started=time.time(), scratch=str(scratch)))
    assert process.wait(100) == -signal.SIGKILL
    assert not scratch.exists()


def test_a_copy_of_the_folder_of_a_job_that_runs_is_refused_and_ends_nothing_of_it(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = LaunchRecord(pid=other.pid, started=time.time() + 1.0, scratch=str(scratch))
    with pytest.raises(UsageError, match=f"is a copy of a job that runs here, in process {other.pid}"):
        launcher._expect_ended(record, tmp_path)
    launcher._expect_ended(msgspec.structs.replace(record, ended=2.0), tmp_path)
    launcher._expect_ended(msgspec.structs.replace(record, started=1.0), tmp_path)  # its number was used again
    launcher._expect_ended(msgspec.structs.replace(record, pid=os.getpid()), tmp_path)
    other.communicate(b"\n")
    launcher._expect_ended(record, tmp_path)
    launcher._expect_ended(None, tmp_path)


def test_what_another_launcher_has_is_left_alone(left):
    process, scratch = left
    launcher._kill_leftovers(None)
    launcher._kill_leftovers(LaunchRecord(pid=1, started=1.0))
    launcher._kill_leftovers(LaunchRecord(pid=1, started=1.0, ended=2.0, scratch=str(scratch)))
    launcher._kill_leftovers(LaunchRecord(pid=1, started=1.0, scratch=str(scratch) + "-other"))
    assert os.waitpid(process.pid, os.WNOHANG) == (0, 0)
    assert scratch.exists()


class Master(pb_grpc.MasterServicer):
    """Tells one event, and stays until its server is stopped."""

    def __init__(self, name):
        self.name, self.server = name, grpc.server(futures.ThreadPoolExecutor(2))
        pb_grpc.add_MasterServicer_to_server(self, self.server)

    def Follow(self, request, context):
        yield pb.Events(events=[pb.Event(name=self.name, fields="{}")])
        gone = threading.Event()
        context.add_callback(gone.set)
        gone.wait(WAIT_S)


def test_a_launcher_hears_of_a_successor_by_the_line_that_it_had_to_the_master_before(tmp_path):
    first, second = Master("first"), Master("second")
    port = first.server.add_insecure_port("127.0.0.1:0")
    job = settings.JobSettings(
        name="job", recipe="none.py", recipe_digest="", workers=1, epochs=1, global_batch=4, seed=0
    )
    settings.save(job, tmp_path)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "master.json").write_text(json.dumps({"address": f"127.0.0.1:{port}"}))
    running = launcher.LocalJob(tmp_path)
    following = threading.Thread(target=running._follow)
    first.server.start()
    following.start()
    told, states = [running._events.get(timeout=WAIT_S)], queue.SimpleQueue()
    first.server.stop(None).wait()
    told.append(running._events.get(timeout=WAIT_S))
    running._master_channel.subscribe(states.put)
    while states.get(timeout=WAIT_S) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
        pass  # until it has asked where nobody is
    second.server.add_insecure_port(f"127.0.0.1:{port}")
    second.server.start()
    told.append(running._events.get(timeout=WAIT_S))
    running._closing = True
    running._master_channel.close()
    following.join(WAIT_S)
    assert [[event.name for event in bundle.events] for bundle in told] == [["first"], [], ["second"]]
    assert not following.is_alive()
    second.server.stop(None).wait()


@pytest.mark.parametrize(("aside", "code"), [([], 0), ([{"record": 3, "why": "torn"}], 3)])
def test_a_detached_job_that_left_records_out_ends_with_the_exit_code_of_one_in_the_foreground(
    aside, code, tmp_path, monkeypatch
):
    class Job:
        def __init__(self, job_dir):
            assert job_dir == tmp_path

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def run(self):
            return {"set_aside": aside}

    monkeypatch.setattr(launcher, "LocalJob", Job)
    monkeypatch.setattr(sys, "argv", ["launcher", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        launcher.main()
    assert ended.value.code == code
