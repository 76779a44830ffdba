"""Promises of a worker's line to the master: what is told at once, what is gathered, and what is never sent."""

import asyncio
import contextlib
import queue
import socket
from concurrent import futures

import grpc
import pytest

from conformance.link import *  # noqa: F403
from conformance.link import WAIT_S
from trueline.train.link import grpc_client
from trueline.train.link.contract import StepReport
from trueline.train.link.grpc_client import MasterLink
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc
from worlds.masters import ALONE, served


@pytest.fixture
def make_link(tmp_path):
    with contextlib.ExitStack() as ends:

        def make():
            link = MasterLink(ends.enter_context(served(ALONE, tmp_path)), "secret", "worker-0.0", lambda _: None)
            ends.callback(link.close)
            return link

        yield make


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
    monkeypatch.setattr(grpc_client, "gathering_s", lambda age_s: 10.0 * WAIT_S)
    ends = []

    def opened(lives: int = 1):
        master = Master(lives)
        server = grpc.server(futures.ThreadPoolExecutor(4))
        pb_grpc.add_MasterServicer_to_server(master, server)
        master.port = server.add_insecure_port("127.0.0.1:0")
        link = MasterLink(f"127.0.0.1:{master.port}", "secret", "worker-0.0", lambda _: None)
        server.start()
        link.join(pb.Hello(store="store", state="state", num_records=8, total_steps=9))
        ends.extend([link.close, lambda: master.lives.put(None), lambda: server.stop(None).wait()])
        return link, master

    yield opened
    for end in ends:
        end()


def stepped(step, generation=1):
    return StepReport(step, generation, 8, 77, 0.5, 2, 0.0, 1 << 62, (10.0, 20.0), (3, 5), 1.0, 2.0, 3.0, 4.0, 0)


def test_the_first_step_of_a_group_the_end_of_an_epoch_and_an_evaluation_are_told_at_once_others_are_gathered(line):
    link, master = line()
    told = []
    link.report_step(1, 1, stepped(0), None)
    told.append(master.reports.get(timeout=WAIT_S))
    link.report_step(1, 2, stepped(1), None)
    link.report_step(1, 3, stepped(2), pb.Certificate(epoch=0))
    told.append(master.reports.get(timeout=WAIT_S))
    link.report_step(1, 4, stepped(3), None)
    link.report_evaluation(pb.Evaluation(step=4))
    told.append(master.reports.get(timeout=WAIT_S))
    link.report_step(2, 5, stepped(4, generation=2), None)
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
        link.report_step(1, step + 1, stepped(step), None)
    link.report_evaluation(pb.Evaluation(step=4))
    while not master.reports.get(timeout=WAIT_S).evaluations:
        pass
    link._send(everything=True)
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
        options = [*grpc_client.RECONNECTING[:2], ("grpc.min_reconnect_backoff_ms", attempt_ms),
                   ("grpc.enable_http_proxy", 0)]  # fmt: skip
        with grpc.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}", options=options) as impatient:
            until_nobody_is_met(impatient, try_to_connect=True)


def test_a_call_while_the_master_is_away_waits_for_the_next_one_and_is_not_repeated(monkeypatch):
    monkeypatch.setattr(grpc_client, "RETRY_S", 10.0 * WAIT_S)  # who asks again asks too late
    master, here = Master(), grpc.server(futures.ThreadPoolExecutor(4))
    port = here.add_insecure_port("127.0.0.1:0")
    here.start()
    here.stop(None).wait()
    link = MasterLink(f"127.0.0.1:{port}", "secret", "worker-0.0", lambda _: None)
    with futures.ThreadPoolExecutor(1) as beside:
        flushed = beside.submit(link._send)
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
            await asyncio.wait_for(asyncio.to_thread(link._send), WAIT_S)
            link.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    while master.reports.get(timeout=WAIT_S).ref != "worker-7.0":
        pass


class Refused(grpc.RpcError):
    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code

    def details(self):
        return "fenced: worker-0.0 is not of this job any more"


class Ended(BaseException):
    """The process has ended."""


@pytest.fixture
def alone(monkeypatch):
    """A line that has met no master; the end of its process is an exception."""

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(grpc_client.os, "_exit", end)
    link = MasterLink("127.0.0.1:1", "secret", "worker-0.0", lambda _: None)
    yield link
    link.close()


AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code not in AWAY])
def test_a_worker_that_the_master_refuses_ends_at_once(alone, capfd, code):
    with pytest.raises(Ended) as ended:
        alone._end_if_fenced(Refused(code))
    assert ended.value.args == (76,)
    assert f"worker.fenced ref=worker-0.0 code={code.name}" in capfd.readouterr().err


@pytest.mark.parametrize("code", AWAY)
def test_a_worker_whose_master_is_away_waits_for_the_next_one(alone, monkeypatch, code):
    answers = iter([Refused(code), Refused(code), pb.Ack(committed=7)])

    def report(request, metadata, wait_for_ready):
        found = next(answers)
        if isinstance(found, Refused):
            raise found
        return found

    monkeypatch.setattr(grpc_client, "RETRY_S", 0.0)
    assert alone._call(report, pb.Progress()).committed == 7


def test_a_refusal_after_the_end_of_the_line_is_none(alone):
    alone._closed = True
    alone._end_if_fenced(Refused(grpc.StatusCode.FAILED_PRECONDITION))


def fenced(self, request, context):
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "fenced: worker-0.0 is not of this job any more")


CALLS = {
    "Enter": lambda link: link.enter(1, 5, 0.0), "Report": lambda link: link._send(everything=True),
    "Suspect": lambda link: link.suspect(1, 2, "odd", ""), "Try": lambda link: link.announce_trial(1, 2, ""),
    "RecordCheckpoint": lambda link: link.report_checkpoint(1, "/c", "d"), "Leave": MasterLink.leave,
    "Fail": lambda link: link.fail("x", "y"), "Finish": lambda link: link.finish(1, 5, ()),
    "ReportBrokenGroup": lambda link: link.report_broken_group(1, "x"),
    "Watch": lambda link: link._watch(pb.Hello(ref="worker-0.0")),  # what a thread of its own does
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_fenced_worker_ends_at_whatever_it_says(monkeypatch, name):
    class Fencing(pb_grpc.MasterServicer):
        """Refuses this call."""

    def end(code):
        raise Ended(code)

    setattr(Fencing, name, fenced)
    monkeypatch.setattr(grpc_client.os, "_exit", end)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    pb_grpc.add_MasterServicer_to_server(Fencing(), server)
    link = MasterLink(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", "secret", "worker-0.0", lambda _: None)
    server.start()
    with pytest.raises(Ended, match="76"):
        CALLS[name](link)
    link.close()
    server.stop(None).wait()


def test_what_a_worker_says_arrives_as_it_was_said_with_the_jobs_secret():
    heard, secrets = [], set()

    class Hearing(pb_grpc.MasterServicer):
        """Keeps what it hears."""

    def hear(self, request, context):
        secrets.update(value for name, value in context.invocation_metadata() if name == "authorization")
        heard.append(request)
        return pb.Ack()

    for name in ("Suspect", "Try", "RecordCheckpoint", "Leave", "ReportBrokenGroup", "Fail"):
        setattr(Hearing, name, hear)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    pb_grpc.add_MasterServicer_to_server(Hearing(), server)
    link = MasterLink(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", "secret", "worker-0.0", lambda _: None)
    server.start()
    link.suspect(3, 17, "odd", "record 17 of x")
    link.announce_trial(3, 18, "record 18 of x")
    link.report_checkpoint(4, "/job/step-4", "digest")
    link.report_broken_group(2, "reset by peer")
    link.fail("data|none", "look")
    link.leave()
    link.close()
    server.stop(None).wait()
    ref = "worker-0.0"
    assert heard == [
        pb.Suspicion(ref=ref, step=3, records=[17], why="odd", where="record 17 of x"),
        pb.Trial(ref=ref, step=3, record=18, where="record 18 of x"),
        pb.Checkpoint(ref=ref, step=4, path="/job/step-4", digest="digest"),
        pb.Fault(ref=ref, generation=2, what="reset by peer"),
        pb.Fault(ref=ref, what="data|none", detail="look"),
        pb.Worker(ref=ref),
    ]
    assert secrets == {"Bearer secret"}


def test_a_view_is_waited_for_until_it_is_newer_and_cuts_what_has_to_be_cut(alone):
    found = []
    for generation, cut_below in ((3, 2), (4, 2), (5, 4)):
        alone.view = pb.View(generation=generation, cut_below=cut_below)
        found.append([alone.wait_view(3, 0.0), alone.wait_view(3, 0.0, cuts=1), alone.wait_view(3, 0.0, cuts=2),
                      alone.wait_view(3, 0.0, cuts=4)])  # fmt: skip
    views = [[None if view is None else view.generation for view in row] for row in found]
    assert views == [[None] * 4, [4, 4, None, None], [5, 5, 5, None]]
    assert alone.view.generation == 5


def test_each_view_cuts_the_groups_below_it(monkeypatch):
    cuts: queue.SimpleQueue[int] = queue.SimpleQueue()

    class Viewing(pb_grpc.MasterServicer):
        def Watch(self, request, context):
            yield pb.View(generation=7, cut_below=6)
            yield pb.View(generation=8, cut_below=6)

    monkeypatch.setattr(grpc_client, "RETRY_S", 10.0 * WAIT_S)
    monkeypatch.setattr(grpc_client, "gathering_s", lambda age_s: 10.0 * WAIT_S)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    pb_grpc.add_MasterServicer_to_server(Viewing(), server)
    link = MasterLink(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", "secret", "worker-0.0", cuts.put)
    server.start()
    link.join(pb.Hello(store="a:1", state="b:1", num_records=8, total_steps=9))
    assert [cuts.get(timeout=WAIT_S), cuts.get(timeout=WAIT_S)] == [6, 6]
    assert link.view.generation == 8
    link.close()
    server.stop(None).wait()


class Answering:
    """A master's stub that acknowledges so many steps, and keeps what it was sent."""

    def __init__(self, committed=0, save_from=0):
        self.ack, self.sent = pb.Ack(committed=committed, save_from=save_from), []

    def Report(self, request, **_):
        self.sent.append(request)
        return self.ack

    def Enter(self, request, **_):
        self.sent.append(request)
        return pb.Plan(source=3)

    def Finish(self, request, **_):
        return pb.Plan(finished=True)


def steps_of(message):
    return [one.step for one in message.applied]


def test_who_leads_sends_each_step_certificate_and_evaluation_once(alone):
    master = alone._master = Answering(save_from=5)
    for step in range(2):
        alone.report_step(1, step + 1, stepped(step), pb.Certificate(epoch=step))
    alone.report_evaluation(pb.Evaluation(step=2))
    alone._send()
    alone.finish(1, 2, [pb.Certificate(epoch=0)])
    first, second = master.sent
    assert (steps_of(first), steps_of(second)) == ([0, 1], [])
    assert [[one.epoch for one in sent.certificates] for sent in master.sent] == [[0, 1], [0]]
    assert [[one.step for one in sent.evaluations] for sent in master.sent] == [[2], []]
    assert (first.generation, first.step, alone.save_from) == (1, 2, 5)


def test_what_comes_while_a_report_is_on_its_way_is_sent_with_the_next_one(alone):
    class Busy(Answering):
        def Report(self, request, **how):
            if not self.sent:
                alone.report_step(1, 2, stepped(1), pb.Certificate(epoch=7))
                alone.report_evaluation(pb.Evaluation(step=2))
            return super().Report(request, **how)

    master = alone._master = Busy()
    alone.report_step(1, 1, stepped(0), None)
    alone._send()
    alone._send()
    assert [steps_of(sent) for sent in master.sent] == [[0], [1]]
    assert [[one.epoch for one in sent.certificates] for sent in master.sent] == [[], [7]]
    assert [[one.step for one in sent.evaluations] for sent in master.sent] == [[], [2]]


def test_who_does_not_lead_drops_what_the_log_has_and_sends_the_rest_when_it_is_overdue(alone, monkeypatch):
    master = alone._master = Answering(committed=2)
    alone.leads = False
    for step in range(4):
        alone.report_step(1, step + 1, stepped(step), None)
    alone._send()
    monkeypatch.setattr(grpc_client.time, "monotonic_ns", lambda: (1 << 62) + grpc_client.OVERDUE_NS + 1)
    alone._send()
    assert [steps_of(sent) for sent in master.sent] == [[], [2, 3]]


def test_who_enters_a_view_brings_all_that_was_not_reported_and_its_own_count_of_steps(alone):
    master = alone._master = Answering()
    alone.leads = False
    alone.report_step(1, 1, stepped(0), pb.Certificate(epoch=0))
    assert alone.enter(2, 4, 7.5).source == 3
    (entry,) = master.sent
    assert (entry.ref, entry.generation, entry.step, entry.rate) == ("worker-0.0", 2, 4, 7.5)
    assert (steps_of(entry.progress), len(entry.progress.certificates)) == ([0], 1)
    alone._send(everything=True)
    assert steps_of(master.sent[1]) == []


def test_a_heartbeat_says_for_how_long_a_worker_has_been_at_what_it_does(alone, monkeypatch):
    master, now = Answering(), [100.0]
    alone._master = master
    monkeypatch.setattr(grpc_client.time, "monotonic", lambda: now[0])
    alone.report_phase("computing")
    now[0] = 103.0
    alone._send()
    alone.report_phase("waiting")
    alone._send()
    assert [(sent.phase, sent.phase_s) for sent in master.sent] == [("computing", 3.0), ("waiting", 0.0)]


def test_steps_that_are_applied_while_a_report_is_gathered_go_with_the_next_one(make_link):
    link = make_link()

    class Step(StepReport):
        def _asdict(self):
            if self.step == 0:  # training goes on in another thread
                link.report_step(1, 2, stepped(2), None)
            return super()._asdict()

    link.report_step(1, 0, Step(*stepped(0)), None)
    link.report_step(1, 1, stepped(1), None)
    first = link._gather_report(everything=True)
    link._drop_reported(first, 0)
    assert [step.step for step in first.applied] == [0, 1]
    assert [step.step for step in link._gather_report(everything=True).applied] == [2]


def test_a_worker_whose_reports_break_ends_instead_of_training_unheard(line, monkeypatch, capfd):
    ended = queue.SimpleQueue()
    monkeypatch.setattr(grpc_client.os, "_exit", ended.put)
    link, _ = line()
    monkeypatch.setattr(link, "_gather_report", lambda **_: 1 / 0)
    link.report_step(1, 1, stepped(0), None)
    assert ended.get(timeout=WAIT_S) == grpc_client.BROKEN_EXIT
    assert "reports: Traceback" in capfd.readouterr().err
