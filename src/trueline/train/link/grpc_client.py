"""A worker's gRPC connection to the master that started it.

A worker that the master has given up is fenced: it ends at once, before it can touch a checkpoint or a peer.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec

from trueline.engine.contract import parse_ref
from trueline.engine.hosts.messages import AGREE, CERTIFICATE_NAME, PULSES, SETTLE, ScriptValues
from trueline.errors import TrainError, UsageError
from trueline.train.link.contract import Link, StepReport, expect_first_loop
from trueline.train.link.local_client import LocalLink
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

FENCED_EXIT, BROKEN_EXIT = 76, 70
HEARTBEAT_S = 0.5
REPORT_S, LATE_REPORT_S, LATE_S = 0.1, 0.75, 15.0
"""How long a new worker gathers reports, and one that is LATE_S old; the log lags by as much. Each report costs
milliseconds of processor time here, at the master and at the launcher. The end of an epoch, an evaluation and the first
step of a group are sent at once."""
OVERDUE_NS = 3_000_000_000
ONE_THREAD = ("SingleThreadedUnaryStream", 1)
"""The thread that waits for views polls itself: with one of gRPC's own, both woke up, ten and five times a second."""
RETRY_S = 0.05
SETTLE_S, STATUS_S = 30.0, 5.0
RECONNECTING = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 300),
                ("grpc.min_reconnect_backoff_ms", 1000), ("grpc.enable_http_proxy", 0)]  # fmt: skip
"""How a channel looks for a master that is away: it retries after 50 to 300 ms, where gRPC would first wait a second.
`min` is what an attempt may take: a starved master, whose greeting takes longer, would never be reached. Calls wait in
gRPC meanwhile (`wait_for_ready`); failing and repeating each took processor time from the steps."""


def resident_bytes() -> int:
    """What this process has in memory; source: proc(5)."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gathering_s(age_s: float) -> float:
    """How many seconds a worker of age `age_s` gathers its reports.

    >>> gathering_s(0.0), gathering_s(3.0), gathering_s(3600.0)
    (0.1, 0.23, 0.75)
    """
    return REPORT_S + (LATE_REPORT_S - REPORT_S) * min(1.0, age_s / LATE_S)


def open_channel(address: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """A channel to the master: over TLS and to the holder of the launch's certificate alone, if TRUELINE_CA is set."""
    ca = os.environ.get("TRUELINE_CA")
    if not ca:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(root_certificates=Path(ca).read_bytes())
    own = [("grpc.ssl_target_name_override", CERTIFICATE_NAME), *PULSES]
    return grpc.secure_channel(address, credentials, options=[*(o for o in options if "keepalive" not in o[0]), *own])


def settle_on_master(data: bytes) -> bytes:
    """The reduction of the loss as the job's first worker reported it. If none has, the master keeps `data` for all
    workers; empty `data` only reads. For workers of joined hosts, which do not see the job's folder. Raises TrainError.
    """
    return _ask(SETTLE, data)


def agree_on_script(values: ScriptValues) -> None:
    """Has the master settle what this worker's script decides for the job. Raises UsageError if the job has begun with
    something else, TrainError. For workers of joined hosts."""
    if refusal := _ask(AGREE, msgspec.json.encode(values)):
        why, hint = json.loads(refusal)
        raise UsageError(why, hint=hint)


def _ask(method: str, data: bytes) -> bytes:
    """What the master answers a worker that is no member yet."""
    with open_channel(os.environ["TRUELINE_MASTER"], RECONNECTING) as channel:
        try:
            call: Any = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
            answer: bytes = call(data, metadata=_own_metadata(), wait_for_ready=True, timeout=SETTLE_S)
        except grpc.RpcError as error:
            raise TrainError(f"the master did not answer: {error}") from error
    return answer


def ask_status() -> dict[str, Any] | None:
    """The job's status from the master that started this process; None if it does not answer."""
    with open_channel(os.environ["TRUELINE_MASTER"], RECONNECTING) as channel:
        master = pb_grpc.MasterStub(channel)
        try:
            reply: pb.JobStatus = master.Status(pb.Cursor(), metadata=_own_metadata(), timeout=STATUS_S)
        except grpc.RpcError:
            return None
    status: dict[str, Any] = json.loads(reply.json)
    return status


def _own_metadata() -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {os.environ['TRUELINE_SECRET']}"),)


_MADE: list["MasterLink"] = []
"""Those of this process, of which one may join; others report why it ends."""


class MasterLink:
    """The link over gRPC. `cut` is called in the watching thread with a generation below which groups are to be cut."""

    def __init__(self, address: str, secret: str, ref: str, cut: Callable[[int], None]) -> None:
        self.ref = ref
        self.leads, self.joined = True, False
        self._cut = cut
        self._metadata = (("authorization", f"Bearer {secret}"),)
        options = [("grpc.keepalive_time_ms", 20000), *RECONNECTING, ONE_THREAD]
        self._channel = open_channel(address, options)
        self._master = pb_grpc.MasterStub(self._channel)
        self._new_view = threading.Condition()
        self.view: pb.View | None = None
        self._generation, self._step = -1, -1
        self._applied: deque[StepReport] = deque()
        self._certificates: deque[pb.Certificate] = deque()
        self._evaluations: deque[pb.Evaluation] = deque()
        self.save_from, self.halting = 0, False
        self._phase, self._since = "starting", time.monotonic()
        self.transfer: Callable[[], tuple[int, int, bool]] = lambda: (0, 0, False)
        self._sending = threading.Lock()
        self._wake, self._urgent = threading.Event(), threading.Event()
        """There is something to report; something to be sent at once."""
        self._closed = False

    def join(self, hello: pb.Hello) -> None:
        hello.ref = self.ref
        expect_first_loop(began=self.joined or (self in _MADE and any(link.joined for link in _MADE)))
        self.joined = True
        threading.Thread(target=self._until_closed, args=(self._watch, hello), name="views", daemon=True).start()
        threading.Thread(target=self._until_closed, args=(self._report,), name="reports", daemon=True).start()

    def _until_closed(self, work: Callable[..., None], *given: Any) -> None:
        try:
            work(*given)
        except Exception as error:  # noqa: BLE001  it ends the process
            if self._closed and isinstance(error, ValueError):  # the channel was closed meanwhile
                return
            # A worker that trains and says nothing would keep its place for good.
            sys.stderr.write(f"{threading.current_thread().name}: {traceback.format_exc()}")
            sys.stderr.flush()
            os._exit(BROKEN_EXIT)

    def _watch(self, hello: pb.Hello) -> None:
        was_away = False
        while not self._closed:
            try:
                for view in self._master.Watch(hello, metadata=self._metadata, wait_for_ready=True):
                    with self._new_view:
                        self.view = view
                        self._new_view.notify_all()
                    self._cut(view.cut_below)
                    if was_away:  # the new master does not know the last steps
                        was_away = False
                        if self.leads:  # the others wait for their next heartbeat
                            self._send_soon()
            except grpc.RpcError as error:
                self._end_if_fenced(error)
            was_away = True
            time.sleep(RETRY_S)  # the master is away

    def wait_view(self, after: int, timeout_s: float, *, cuts: int = -1) -> pb.View | None:
        def there() -> bool:
            view = self.view
            return view is not None and view.generation > after and view.cut_below > cuts

        with self._new_view:
            return self.view if self._new_view.wait_for(there, timeout_s) else None

    def enter(self, generation: int, step: int, rate: float) -> pb.Plan:
        with self._sending:
            message = self._gather_report(everything=True)
            self._drop_reported(message, 0)  # the call is repeated until it arrives; heartbeats continue meanwhile
        entry = pb.Entry(ref=self.ref, generation=generation, step=step, rate=rate, progress=message)
        plan: pb.Plan = self._call(self._master.Enter, entry)
        if plan.halts_from:
            self.save_from, self.halting = plan.halts_from, True
        return plan

    def finish(self, generation: int, step: int, certificates: Sequence[pb.Certificate]) -> pb.Plan:
        self._certificates.extend(certificates)
        self._send(everything=True)
        plan: pb.Plan = self._call(self._master.Finish, pb.Entry(ref=self.ref, generation=generation, step=step))
        return plan

    def report_step(self, generation: int, step: int, report: StepReport, certificate: pb.Certificate | None) -> None:
        self._applied.append(report)
        if certificate is not None:
            self._certificates.append(certificate)
        new, self._generation, self._step = generation != self._generation, generation, step
        if new or certificate is not None:
            self._send_soon()
        elif self.leads and len(self._applied) == 1:
            self._wake.set()

    def report_evaluation(self, evaluation: pb.Evaluation) -> None:
        self._evaluations.append(evaluation)
        self._send_soon()

    def report_phase(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()

    def suspect(self, step: int, record: int, why: str, where: str) -> None:
        self._call(self._master.Suspect, pb.Suspicion(ref=self.ref, step=step, records=[record], why=why, where=where))

    def announce_trial(self, step: int, record: int, where: str) -> None:
        self._call(self._master.Try, pb.Trial(ref=self.ref, step=step, record=record, where=where))

    def _report(self) -> None:
        born = time.monotonic()
        while True:
            gathered_s = gathering_s(time.monotonic() - born)
            if not self._urgent.wait(gathered_s):
                self._wake.wait(max(0.0, HEARTBEAT_S - gathered_s))
            self._urgent.clear()
            self._wake.clear()
            if self._closed:
                return
            self._send()

    def _send_soon(self) -> None:
        self._urgent.set()
        self._wake.set()

    def _send(self, *, everything: bool = False) -> None:
        with self._sending:
            message = self._gather_report(everything=everything)
            ack: pb.Ack = self._call(self._master.Report, message)
            self._drop_reported(message, ack.committed)
        self.save_from, self.halting = ack.save_from, ack.halting

    def _gather_report(self, *, everything: bool) -> pb.Progress:
        overdue = bool(self._applied) and time.monotonic_ns() - self._applied[0].at_ns > OVERDUE_NS
        due = tuple(self._applied) if everything or self.leads or overdue else ()  # training appends meanwhile
        moved, to_move, sending = self.transfer()
        return pb.Progress(
            ref=self.ref, generation=self._generation, step=self._step,
            applied=[pb.Applied(**report._asdict()) for report in due],
            certificates=list(self._certificates), evaluations=list(self._evaluations),
            phase=self._phase, phase_s=time.monotonic() - self._since, moved=moved, to_move=to_move, sending=sending,
            memory=resident_bytes(),
        )  # fmt: skip

    def _drop_reported(self, message: pb.Progress, committed: int) -> None:
        for _ in message.applied:
            self._applied.popleft()
        while self._applied and self._applied[0].step < committed:
            self._applied.popleft()
        for _ in message.certificates:
            self._certificates.popleft()
        for _ in message.evaluations:
            self._evaluations.popleft()

    def report_checkpoint(self, step: int, path: str, digest: str, *, full: str = "", last: bool = False) -> None:
        checkpoint = pb.Checkpoint(ref=self.ref, step=step, path=path, digest=digest, full=full, last=last)
        self._call(self._master.RecordCheckpoint, checkpoint)

    def leave(self) -> None:
        self._call(self._master.Leave, pb.Worker(ref=self.ref))

    def report_broken_group(self, generation: int, why: str) -> None:
        self._call(self._master.ReportBrokenGroup, pb.Fault(ref=self.ref, generation=generation, what=why))

    def fail(self, what: str, detail: str) -> None:
        self._call(self._master.Fail, pb.Fault(ref=self.ref, what=what, detail=detail))

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        while True:
            try:
                return method(request, metadata=self._metadata, wait_for_ready=True)
            except grpc.RpcError as error:
                self._end_if_fenced(error)
                time.sleep(RETRY_S)  # the master is away

    def _end_if_fenced(self, error: grpc.RpcError) -> None:
        """Returns when the master may come back; ends the process when the master has fenced this worker."""
        code = error.code()
        away = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
        if self._closed or code in away:
            return
        details = error.details()
        sys.stderr.write(f"worker.fenced ref={self.ref} code={code.name} why={details!r}\n")
        sys.stderr.flush()
        os._exit(FENCED_EXIT)

    def close(self) -> None:
        self._closed = True
        self._send_soon()
        self._channel.close()


def is_replacement() -> bool:
    """Whether another worker was in this one's slot before."""
    return parse_ref(os.environ.get("TRUELINE_REF") or "worker-0.0")[2] > 0


def connect(cut: Callable[[int], None]) -> Link:
    """The link to the master that started this process, or a `LocalLink`. `cut` is called in another thread."""
    address = os.environ.get("TRUELINE_MASTER")
    if address is None:
        return LocalLink()
    try:
        _MADE.append(MasterLink(address, os.environ["TRUELINE_SECRET"], os.environ["TRUELINE_REF"], cut))
        return _MADE[-1]
    except KeyError as error:
        raise TrainError(
            f"TRUELINE_MASTER is set but {error} is not", hint="start workers through an engine"
        ) from error
