"""Promises of a worker's line to the master: what is told at once, what is gathered, and what is never sent."""

import asyncio
import queue
import socket
from concurrent import futures

import grpc
import pytest

from trueline.train import master_link
from trueline.train.master_link import MasterLink
from trueline.train.stepped import Stepped
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

WAIT_S = 100
"""Nothing here ends by waiting; a machine may be slow."""


class Master(pb_grpc.MasterServicer):
    """Keeps the reports; each of its streams of views ends after one, as that of a master that dies."""

    def __init__(self, lives: int = 1) -> None:
        self.reports: queue.SimpleQueue[pb.Progress] = queue.SimpleQueue()
        self.committed, self.lives = 0, queue.SimpleQueue()
        for _ in range(lives):
            self.lives.put(None)

    def Report(self, request, context):
        self.reports.put(request)
        return pb.Ack(committed=self.committed)

    def Watch(self, request, context):
        self.lives.get()
        yield pb.View(generation=1, members=["worker-0.0"], cut_below=1)


@pytest.fixture
def line(monkeypatch):
    """Opens a line to a master of so many lives; whatever may be gathered is gathered for longer than a test lasts."""
    monkeypatch.setattr(master_link, "gathering_s", lambda age_s: 10.0 * WAIT_S)
    ends = []

    def opened(lives: int = 1):
        master = Master(lives)
        server = grpc.server(futures.ThreadPoolExecutor(4))
        pb_grpc.add_MasterServicer_to_server(master, server)
        master.port = server.add_insecure_port("127.0.0.1:0")
        link = MasterLink(f"127.0.0.1:{master.port}", "secret", "worker-0.0", lambda _: None)
        server.start()
        link.ready("store", state="state", num_records=8, total_steps=9, shard_records=0)
        ends.extend([link.close, lambda: master.lives.put(None), lambda: server.stop(None).wait()])
        return link, master

    yield opened
    for end in ends:
        end()


def stepped(step, generation=1):
    return Stepped(step, generation, 8, 77, 0.5, 2, 0.0, 1 << 62, (10.0, 20.0), (3, 5), 1.0, 2.0, 3.0, 4.0, 0)


def test_the_first_step_of_a_group_the_end_of_an_epoch_and_an_evaluation_are_told_at_once_others_are_gathered(line):
    link, master = line()
    told = []
    link.progress(1, 1, stepped(0), None)
    told.append(master.reports.get(timeout=WAIT_S))
    link.progress(1, 2, stepped(1), None)
    link.progress(1, 3, stepped(2), pb.Certificate(epoch=0))
    told.append(master.reports.get(timeout=WAIT_S))
    link.progress(1, 4, stepped(3), None)
    link.evaluated(pb.Evaluation(step=4))
    told.append(master.reports.get(timeout=WAIT_S))
    link.progress(2, 5, stepped(4, generation=2), None)
    told.append(master.reports.get(timeout=WAIT_S))
    assert [[one.step for one in report.applied] for report in told] == [[0], [1, 2], [3], [4]]
    assert [len(report.certificates) for report in told] == [0, 1, 0, 0]
    assert told[0].applied[0] == pb.Applied(
        step=0, generation=1, records=8, digest=77, loss=0.5, workers=2, at_ns=1 << 62, rates=[10.0, 20.0],
        shares=[3, 5], data_ms=1.0, compute_ms=2.0, wait_ms=3.0, commit_ms=4.0,
    )  # fmt: skip


def test_who_does_not_lead_keeps_its_steps_until_the_log_has_them_and_sends_only_the_others(line):
    link, master = line()
    link.leads, master.committed = False, 2
    for step in range(4):
        link.progress(1, step + 1, stepped(step), None)
    link.evaluated(pb.Evaluation(step=4))
    while not master.reports.get(timeout=WAIT_S).evaluations:
        pass
    link.flush()
    assert [one.step for one in master.reports.get(timeout=WAIT_S).applied] == [2, 3]


def test_a_master_that_comes_back_hears_at_once_from_its_workers(line):
    link, master = line(lives=2)
    assert master.reports.get(timeout=WAIT_S).ref == link.ref


def until_nobody_is_met(channel, **options):
    """Returns when the channel has tried to connect, in vain."""
    states = queue.SimpleQueue()
    channel.subscribe(states.put, **options)
    while states.get(timeout=WAIT_S) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
        pass
    channel.unsubscribe(states.put)


def until_given_up(attempt_ms):
    """Returns when a client that has so much patience gives up a master that does not greet it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = [*master_link.RECONNECTING[:2], ("grpc.min_reconnect_backoff_ms", attempt_ms),
                   ("grpc.enable_http_proxy", 0)]  # fmt: skip
        with grpc.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}", options=options) as impatient:
            until_nobody_is_met(impatient, try_to_connect=True)


def test_a_call_while_the_master_is_away_waits_for_the_next_one_and_is_not_repeated(monkeypatch):
    monkeypatch.setattr(master_link, "RETRY_S", 10.0 * WAIT_S)  # who asks again asks too late
    master, here = Master(), grpc.server(futures.ThreadPoolExecutor(4))
    port = here.add_insecure_port("127.0.0.1:0")
    here.start()
    here.stop(None).wait()
    link = MasterLink(f"127.0.0.1:{port}", "secret", "worker-0.0", lambda _: None)
    with futures.ThreadPoolExecutor(1) as beside:
        flushed = beside.submit(link.flush)
        until_nobody_is_met(link._channel)
        assert not flushed.done()
        successor = grpc.server(futures.ThreadPoolExecutor(4))
        pb_grpc.add_MasterServicer_to_server(master, successor)
        successor.add_insecure_port(f"127.0.0.1:{port}")
        successor.start()
        flushed.result(WAIT_S)
    assert master.reports.qsize() == 1
    link.close()
    successor.stop(None).wait()


def test_a_master_that_takes_its_time_to_greet_is_reached_all_the_same(line):
    """Whoever gives up after 300 ms and connects anew waits for the next greeting, and never has one."""
    _, master = line()
    port = master.port

    tasks = []

    async def pump(source, sink):
        while piece := await source.read(65536):
            sink.write(piece)
        sink.close()

    async def late(reader, writer):
        tasks.append(asyncio.current_task())
        await asyncio.to_thread(until_given_up, attempt_ms=600)  # what the machine is busy with
        inwards, outwards = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, outwards), pump(inwards, writer), return_exceptions=True)
        for end in (writer, outwards):
            end.close()
            await end.wait_closed()

    async def scenario():
        async with await asyncio.start_server(late, "127.0.0.1", 0) as door:
            address = f"127.0.0.1:{door.sockets[0].getsockname()[1]}"
            link = MasterLink(address, "secret", "worker-7.0", lambda _: None)
            await asyncio.wait_for(asyncio.to_thread(link.flush), WAIT_S)
            link.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    while master.reports.get(timeout=WAIT_S).ref != "worker-7.0":
        pass
