"""Handlers' processes: every outcome, death, hang, limits, restarts. Real processes; the handlers are plain Python."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from trueline.errors import DeadlineExceeded, NotReady, Overloaded
from trueline.serve.handlers import framing
from trueline.serve.handlers.budget import Limits
from trueline.serve.handlers.config import HandlerPlan
from trueline.serve.handlers.failures import HandlerFailed, StartFailed
from trueline.serve.handlers.pool import Pool
from trueline.serve.handlers.worker import LONG_BYTES, Launch, Worker
from trueline.serve.models.servable import HandlerAnswer, HandlerRequest
from worlds import archives

pytestmark = pytest.mark.slow

MANY = """
    import os, signal, sys, time
    from ts.utils.util import PredictionException
    from ts.handler_utils.utils import send_intermediate_predict_response

    class Many:
        def initialize(self, context):
            self.calls = 0
            assert context.system_properties["gpu_id"] is None
            assert context.manifest["model"]["modelName"] == "noop"
            self.greeting = context.model_yaml_config["greeting"]

        def handle(self, data, context):
            self.calls += 1
            act = data[0].get("act")
            act = act.decode() if isinstance(act, bytearray) else act
            if act == "fail":
                raise ValueError("secret detail")
            if act == "refuse":
                raise PredictionException("no such breed", 404)
            if act == "memory":
                raise MemoryError
            if act == "no list":
                return {"a": 1}
            if act == "short":
                return []
            if act == "odd":
                return [object()]
            if act == "exit":
                os._exit(3)
            if act == "sysexit":
                sys.exit(4)
            if act == "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            if act == "torch":
                return ["torch" in sys.modules]
            if act == "batch":
                return [len(data)] * len(data)
            if act == "large":
                return [bytes(data[0]["body"])[::-1]]
            if act == "pieces":
                send_intermediate_predict_response([b"one"], context.request_ids, "", 200, context)
                send_intermediate_predict_response(["two"], context.request_ids, "", 200, context)
                return [b"three"]
            context.metrics.add_counter("hits", len(data))
            context.set_response_status(code=201, phrase="made", idx=0)
            context.set_response_content_type(0, "text/plain")
            return [{"greeting": self.greeting, "data": str(row), "explain": context.get_request_header(i, "explain")}
                    for i, row in enumerate(data)]
"""


def launch(tmp_path: Path, code: str = MANY, limits: Limits | None = None, **plan: Any) -> Launch:
    folder = tmp_path / "archive"
    for name, content in archives.files(code, config="greeting: hello").items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return Launch(
        model="noop",
        version="1.0",
        folder=folder,
        config_file="model-config.yaml",
        plan=replace(HandlerPlan(handler="noop.py", max_batch_delay_s=0.0), **plan),
        limits=limits or Limits(),
    )


def ask(act: str = "", content: bytes = b"", kind: str = "", **headers: str) -> HandlerRequest:
    return HandlerRequest(
        request_id="r", parts=[("act", "text/plain", act.encode()), ("body", kind, content)], headers=headers
    )


def in_pool(told: Launch, act: Callable[[Pool], Awaitable[None]], workers: int = 1, **options: Any) -> None:
    async def whole() -> None:
        pool = Pool(told, asyncio.get_running_loop(), **options)
        await pool.begin(workers)
        try:
            await asyncio.wait_for(act(pool), 120)
        finally:
            await pool.close()

    asyncio.run(whole())


def test_every_outcome_of_a_handler_is_answered_as_torchserve_does(tmp_path: Path) -> None:
    counted: list[Any] = []

    async def act(pool: Pool) -> None:
        pid = pool.workers()[0][1].pid
        answer = await pool.submit(ask("", b'{"x": 1}', "application/json", explain="False"))
        assert (answer.status, answer.phrase, answer.headers) == (201, "made", {"content-type": "text/plain"})
        assert json.loads(answer.body) == {
            "greeting": "hello",
            "data": "{'act': '', 'body': {'x': 1}}",
            "explain": "False",
        }
        raw = await pool.submit(ask("", b'{"x": ', "application/json"))
        assert "bytearray" in json.loads(raw.body)["data"], "JSON that cannot be read is passed on as it came"
        for what, status, words in [
            ("fail", 503, "Prediction failed"),
            ("refuse", 404, "no such breed"),
            ("memory", 507, "Out of resources"),
            ("no list", 503, "Invalid model predict output"),
            ("short", 503, "number of batch response mismatched"),
            ("odd", 503, "Unsupported model output data type."),
        ]:
            with pytest.raises(HandlerFailed) as failed:
                await pool.submit(ask(what))
            assert (failed.value.status, failed.value.message) == (status, words), what
        large = os.urandom(3_000_000)
        assert (await pool.submit(ask("large", large))).body == large[::-1]
        assert (await pool.submit(ask("torch"))).body == b"false", "a handler without torch runs without torch"
        pieces: list[HandlerAnswer] = []
        told = ask("pieces")
        told.on_piece = pieces.append
        assert (await pool.submit(told)).body == b"three"
        assert [bytes(one.body) for one in pieces] == [b"one", b"two"]
        assert pool.workers()[0][1].pid == pid, "no outcome costs the worker its life"
        status = Path(f"/proc/{pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert [line.split()[4:6] for line in limits.splitlines() if line.startswith("Max core file")] == [["0", "0"]]
        assert [line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")] == ["1024"]

    in_pool(launch(tmp_path), act, on_metrics=counted.extend)
    assert ["hits", "counter", 1.0, {"ModelName": "noop", "Level": "Model"}] in counted
    assert any(name == "PredictionTime" for name, *_ in counted)


STEPS = """
    def handle(data, context):
        if data is None:
            context.cache = {}
            return None
        names = [context.get_request_id(index) for index in range(len(data))]
        for name, row in zip(names, data):
            context.cache.setdefault(name, int(row["act"] or "0"))
            context.cache[name] -= 1
        context.stopping_criteria = [lambda answer, name=name: more(context.cache, name) for name in names]
        return [f"{context.cache[name]} of {len(names)} " for name in names]

    def more(cache, name):
        if cache[name] < 0:
            return None
        return cache[name] == 0
"""


def test_a_handler_with_stopping_criteria_is_called_until_each_answer_is_whole(tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        pieces: dict[str, list[bytes]] = {}
        asked = []
        for name, act in [("long", "3"), ("plain", "0"), ("short", "2")]:
            told = ask(act)
            told.request_id = name
            told.on_piece = lambda piece, name=name: pieces.setdefault(name, []).append(bytes(piece.body))
            asked.append(pool.submit(told))
        assert [(await one).body for one in asked] == [b"0 of 1 ", b"-1 of 3 ", b"0 of 2 "]
        assert pieces == {"long": [b"2 of 3 ", b"1 of 2 "], "short": [b"1 of 3 "]}

    in_pool(launch(tmp_path, STEPS, batch_size=3, max_batch_delay_s=5.0), act)


def test_requests_that_wait_are_answered_as_one_batch_and_an_explanation_alone(tmp_path: Path) -> None:
    batches: list[int] = []

    async def act(pool: Pool) -> None:
        first = [pool.submit(ask("batch")) for _ in range(4)]
        alone = pool.submit(ask("batch"), alone=True)
        assert [(await one).body for one in first] == [b"4"] * 4
        assert (await alone).body == b"1"
        gone = pool.submit(ask("batch"))
        gone.cancel()
        assert (await pool.submit(ask("batch"))).body == b"1", "who goes away is left out"

    told = launch(tmp_path, batch_size=4, max_batch_delay_s=0.2)
    in_pool(told, act, on_batch=lambda requests, took_s, waited_s: batches.append(requests))
    assert batches == [4, 1, 1]


def test_a_worker_that_dies_fails_its_request_at_once_and_another_takes_its_place(tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        for what in ("exit", "sysexit"):
            before = pool.workers()[0][1].pid
            dying, behind = pool.submit(ask(what)), pool.submit(ask("torch"))
            with pytest.raises(HandlerFailed, match=r"Worker died\."):
                await dying
            assert (await behind).body == b"false", "who waited behind it is answered by the next worker"
            assert pool.workers()[0][1].pid != before
        asked = pool.submit(ask("hang"))
        await asyncio.sleep(0)
        os.kill(pool.workers()[0][1].pid, signal.SIGKILL)
        with pytest.raises(HandlerFailed, match=r"Worker died\."):
            await asked

    in_pool(launch(tmp_path), act)


def test_a_long_request_is_sent_beside_the_loop_and_fails_with_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: dict[int, int] = {}
    send = framing.send

    def note(sock: socket.socket, head: framing.Head, parts: Sequence[framing.Part] = ()) -> None:
        senders[sum(map(len, parts))] = threading.get_ident()
        send(sock, head, parts)

    monkeypatch.setattr(framing, "send", note)
    short, long = b"x" * 1000, b"x" * (LONG_BYTES + 1)

    async def act(pool: Pool) -> None:
        for content in (short, long):
            assert (await pool.submit(ask("large", content))).body == content
        assert senders[len("large") + len(short)] == threading.get_ident()
        assert senders[len("large") + len(long)] != threading.get_ident()
        with pytest.raises(HandlerFailed, match=r"Worker died\."):
            await pool.submit(ask("exit", long))
        assert (await pool.submit(ask("large", long))).body == long

    in_pool(launch(tmp_path), act)


def test_a_handler_that_hangs_is_killed_at_its_timeout_and_another_takes_its_place(tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        pid = pool.workers()[0][1].pid
        pool.launch = replace(told, plan=replace(told.plan, response_timeout_s=60.0))  # of the next one
        with pytest.raises(DeadlineExceeded, match=r"gave no answer within 0\.2 s; its worker was ended"):
            await pool.submit(ask("hang"))
        assert (await pool.submit(ask("torch"))).body == b"false"
        assert not Path(f"/proc/{pid}").exists()

    told = launch(tmp_path, response_timeout_s=0.2)
    in_pool(told, act)


def test_a_full_queue_refuses_and_scaling_to_nothing_answers_those_that_wait(tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        asked = [pool.submit(ask("torch")) for _ in range(3)]  # one runs, two wait
        with pytest.raises(Overloaded):
            pool.submit(ask("torch"))
        pool.scale(0)
        assert [(await one).body for one in asked] == [b"false"] * 3
        await pool.wait_empty()
        assert (pool.num_workers, pool.workers()) == (0, [])

    in_pool(launch(tmp_path, queue_size=2), act)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def handle(data, context): raise RuntimeError('no weights in /srv/models/x.pt')", "no weights in"),
        ("import os; os._exit(7)", "its worker ended with exit code 7"),
        ("x = 1", "is to have a function handle"),
    ],
)
def test_a_handler_that_does_not_come_up_says_why_and_names_no_path(tmp_path: Path, code: str, words: str) -> None:
    async def act() -> None:
        pool = Pool(launch(tmp_path, dedent(code)), asyncio.get_running_loop())
        with pytest.raises(StartFailed, match=words) as failed:
            await pool.begin(1)
        assert "/srv" not in failed.value.message
        assert pool.num_workers == 0

    asyncio.run(act())


def test_a_worker_that_keeps_dying_is_given_up_and_those_who_wait_are_told(tmp_path: Path) -> None:
    code = """
        import os
        def handle(data, context):
            if data is None and os.path.exists("died"):
                os._exit(1)
            if data is not None:
                open("died", "w").close()
                os._exit(1)
    """

    async def act(pool: Pool) -> None:
        with pytest.raises(HandlerFailed):
            await pool.submit(ask())
        with pytest.raises(NotReady, match="has no worker"):
            await pool.submit(ask())
        assert pool.sick
        assert pool.num_workers == 0

    in_pool(launch(tmp_path, code, max_retry_s=0.0), act)


def test_a_handler_that_fills_its_memory_is_bounded_and_the_next_request_is_answered(tmp_path: Path) -> None:
    code = """
        def handle(data, context):
            if data and data[0]["act"] == "leak":
                keep = []
                while True:
                    keep.append(bytearray(1 << 24))
            return [b"fine"] * len(data or [])
    """

    async def act(pool: Pool) -> None:
        with pytest.raises(HandlerFailed) as failed:
            await pool.submit(ask("leak"))
        assert (failed.value.status, failed.value.message) == (507, "Out of resources")
        assert (await pool.submit(ask())).body == b"fine"

    in_pool(launch(tmp_path, code, limits=Limits(address_space=2**29)), act)


WRAPPED = """
    def plain(one):
        if isinstance(one, dict):
            return {name: plain(value) for name, value in one.items()}
        return one.decode() if isinstance(one, bytes) else one

    class Wrapped:
        def initialize(self, context):
            pass

        def handle(self, data, context):
            if data == [b"fail"]:
                return []
            return [{"saw": plain(one)} for one in data]
"""


def posted(value: Any, kind: str = "application/json", **headers: str) -> HandlerRequest:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return HandlerRequest(request_id="r7", parts=[("body", kind, content)], headers={"explain": "False"} | headers)


def test_what_is_around_the_data_is_taken_off_and_put_on_for_every_request_of_a_batch(tmp_path: Path) -> None:
    async def rows(pool: Pool) -> None:
        bodies = [{"instances": [1, {"b64": "aGk="}]}, b'{"instances": [{"x": {"b64": "aGk="}, "y": 2}]}']
        kinds = ("application/json", "text/csv")  # also where a client does not say that it is JSON
        first, second = (pool.submit(posted(*asked)) for asked in zip(bodies, kinds, strict=True))
        assert json.loads((await first).body) == {"predictions": [{"saw": 1}, {"saw": "hi"}]}
        assert json.loads((await second).body) == {"predictions": [{"saw": {"x": "hi", "y": 2}}]}
        for body, words in [(b"[1]", "a JSON object"), (b"{", "a JSON object"), ({"instances": 3}, "'instances'"),
                            ({"instances": [{"b64": "?"}]}, "base64")]:  # fmt: skip
            with pytest.raises(HandlerFailed, match=words) as refused:
                await pool.submit(posted(body))
            assert refused.value.status == 400
        with pytest.raises(HandlerFailed, match="a list of 1 answers") as short:
            await pool.submit(posted({"instances": [{"b64": "ZmFpbA=="}]}))
        assert short.value.status == 503

    async def explained(pool: Pool) -> None:
        found = await pool.submit(posted({"instances": [1]}, explain="True"), alone=True)
        assert json.loads(found.body) == {"explanations": [{"saw": 1}]}

    async def bodies(pool: Pool) -> None:
        assert json.loads((await pool.submit(posted([1, 2]))).body) == {"saw": [1, 2]}

    in_pool(launch(tmp_path, WRAPPED, envelope="json", batch_size=2, max_batch_delay_s=0.2), rows)
    in_pool(launch(tmp_path, WRAPPED, envelope="kserve"), explained)
    in_pool(launch(tmp_path, WRAPPED, envelope="body"), bodies)


SECOND = """
    def handle(data, context):
        if data is None:
            return
        return [2 if row["data"] == "two" else [2 * value for value in row["data"][0]] for row in data]
"""


def test_the_second_protocol_is_read_and_answered_around_a_handler_for_every_request_of_a_batch(tmp_path: Path) -> None:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.0]}
    text = {"name": "t", "shape": [1], "datatype": "BYTES", "data": ["two"]}

    async def act(pool: Pool) -> None:
        asked = {"id": "q", "inputs": [tensor, text]}, {"inputs": [tensor]}
        first, second = (pool.submit(posted(one)) for one in asked)
        output = {"name": "x", "shape": [2], "datatype": "FP64", "data": [3.0, 4.0]}
        number = {"name": "t", "shape": [1], "datatype": "INT64", "data": [2]}
        model = {"model_name": "noop", "model_version": "1.0"}
        assert json.loads((await first).body) == {"id": "q", **model, "outputs": [output, number]}
        assert json.loads((await second).body) == {"id": "r7", **model, "outputs": [output]}
        flawed = {"an object with a name": 3, "shape": tensor | {"shape": [3]}, "to be lists": tensor | {"data": 3}}
        for words, wrong in flawed.items():
            with pytest.raises(HandlerFailed, match=words) as refused:
                await pool.submit(posted({"inputs": [wrong]}))
            assert refused.value.status == 400

    in_pool(launch(tmp_path, SECOND, envelope="kservev2", batch_size=2, max_batch_delay_s=0.2), act)


def test_a_long_answer_is_read_in_a_thread_and_counts_although_its_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reaped, read, reap = threading.Event(), framing.Frame.read, Worker._reap
    threads: set[bool] = set()

    def reads(frame: framing.Frame, kind: Any) -> Any:
        if frame.num_bytes > LONG_BYTES:
            threads.add(threading.current_thread() is threading.main_thread())
            assert reaped.wait(60)
        return read(frame, kind)

    def reaps(worker: Worker) -> None:
        reap(worker)
        reaped.set()

    monkeypatch.setattr(framing.Frame, "read", reads)
    monkeypatch.setattr(Worker, "_reap", reaps)
    content = os.urandom(4 * LONG_BYTES)

    async def act(pool: Pool) -> None:
        pid = pool.workers()[0][1].pid
        waiting = pool.submit(ask("large", content))
        while not threads:
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        answer = await waiting
        assert answer.body == content[::-1]
        assert type(answer.body) is bytes, "no copy is made to send it"

    in_pool(launch(tmp_path), act)
    assert threads == {False}
