"""Workflows: what a specification may say, and graphs of real handler processes behind both ports. No torch."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trueline import serve
from trueline.errors import StorageError
from trueline.serve import RunningServer
from trueline.serve.handlers import archive as packed
from trueline.serve.handlers.archive import ArchiveError, HoldsWorkflow, peek
from trueline.serve.handlers.budget import Limits
from trueline.serve.handlers.loader import ArchiveLoader, name_in_store
from trueline.serve.models import desired_state
from trueline.serve.models.catalog import Models
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import ResolvedSource, VersionOptions
from trueline.serve.models.sources import Store
from trueline.serve.models.watchers import StateFollower
from trueline.serve.protocols.router import Routes
from trueline.torchserve.extension import TorchServe
from trueline.torchserve.management import Management
from trueline.torchserve.workflows import archive, spec
from trueline.torchserve.workflows.registry import Workflows
from trueline.torchserve.workflows.spec import SpecError, functions_of
from trueline.web.messages import Request, Response
from worlds import archives, servers
from worlds.cases import few

FUNCTIONS = """
    import json

    def pre(data, context):
        return None if data is None else [json.dumps({"x": json.loads(data[0].get("data") or data[0]["body"])})]

    def join(data, context):
        if data is None:
            return None
        return [{name: json.loads(value) for name, value in sorted(data[0].items())}]
"""
SPEC = """
    models:
      min-workers: 1
      max-workers: 1
      batch-size: 4
      max-batch-delay: 0
      retry-attempts: 3
      double: {url: double.mar}
      triple: {url: "https://models.example/mar/triple.mar?version=3", batch-size: 1, timeout-ms: 60000}
    dag:
      pre: [double, triple]
      double: [join]
      triple: [join]
"""
TIMES = """
    import json

    def handle(data, context):
        return None if data is None else [{"times": %d, "is": %d * json.loads(row["body"])["x"]} for row in data]
"""


# specifications


def read(text: str, *functions: str) -> spec.Spec:
    return spec.read(yaml.safe_load(text), functions)


def test_settings_are_a_models_own_else_those_of_all_else_torchserves() -> None:
    found = read(
        """
        models:
          m1: {url: one.mar, max-workers: 2, batch-size: 8, retry-attempts: 0, batchsize: 9}
          spare: {url: spare.mar}
          min-workers: 1
          batch-size: 3
          timeout-ms: 5000
        dag:
          pre: [m1]
          m1: [post, "", null, post]
        """,
        "pre",
        "post",
    )
    pre, m1, post = found.nodes
    assert [node.name for node in found.nodes] == ["pre", "m1", "post"]
    assert (m1.url, m1.settings.workers, m1.settings.batch_size, m1.settings.max_batch_delay) == ("one.mar", 2, 8, None)
    assert (m1.attempts, m1.timeout_s, pre.attempts, pre.timeout_s) == (1, 5.0, 2, 5.0)
    assert (pre.url, pre.settings.batch_size, post.parents, found.leaves) == ("", None, ("m1",), ("post",))
    assert found.dag == {"pre": ("m1",), "m1": ("post",)}
    assert found.ignored == ("models.spare", "models.m1.batchsize")
    common = found.common
    assert (common.min_workers, common.max_workers, common.batch_size, common.max_batch_delay) == (1, 1, 3, 50)


@pytest.mark.parametrize(
    ("dag", "words"),
    [
        ("{a: [b], b: [c], c: [a]}", r"the dag goes in a circle: . -> . -> . -> ."),
        ("{a: [b], b: [c, a], c: []}", r"the dag goes in a circle"),
        ("{a: [a]}", r"the dag goes in a circle: a -> a"),
        ("{a: [c], b: [c]}", r"the dag has the start nodes a, b; it may have one: put a function before them"),
        ("{a: [zz]}", r"node 'zz' of the dag is neither a model of the specification \(it has: m\) nor a function"),
        ("{zz: [a]}", r"node 'zz' of the dag is neither"),
        ("{a: b}", r"node 'a' of the dag is to name a list of nodes, it is str"),
        ("{a: [[b]]}", r"node 'a' of the dag leads to something that is no name \(list\)"),
        ("{1: [b]}", r"'1' under 'dag' is no text: put it into quotes"),
        ("{}", r"the dag has 0 nodes; 1 to 64 go"),
        ("[a, b]", r"'dag' of the specification is to be a mapping by name, it is list"),
        ("{" + ", ".join(f"n{i}: [n{i + 1}]" for i in range(70)) + "}", r"the dag has 71 nodes"),
    ],
)
def test_a_graph_that_cannot_be_followed_is_refused_in_words(dag: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read(f"{{models: {{m: {{url: m.mar}}}}, dag: {dag}}}", "a", "b", "c")


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("{m: m.mar}", r"'m' under 'models' is str, neither a model \(url: file.mar\) nor one of the settings"),
        ("{batchsize: 3}", r"'batchsize' under 'models' is int, neither"),
        ("{m: {}}", r"model 'm' of the specification cannot be used: .*`url`"),
        ("{m: {url: m.mar, batch-size: 0}}", r"model 'm' of the specification cannot be used: .*batch-size"),
        ("{min-workers: many}", r"'models' of the specification cannot be used: .*min-workers"),
        ("{timeout-ms: -1}", r"'models' of the specification cannot be used: .*timeout-ms"),
        ("null", r"'models' of the specification is to be a mapping by name, it is nothing"),
    ],
)
def test_models_that_cannot_be_are_refused_in_words(models: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read(f"{{models: {models}, dag: {{a: [b]}}}}", "a", "b")


@given(edges=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=14))
def test_a_graph_is_refused_or_every_node_stands_after_what_it_needs(edges: list[tuple[int, int]]) -> None:
    dag: dict[str, list[str]] = {}
    for one, other in edges:
        dag.setdefault(f"n{one}", []).append(f"n{other}")
    try:
        found = spec.read({"models": {}, "dag": dag}, [f"n{i}" for i in range(6)])
    except SpecError:
        return
    seen: set[str] = set()
    for node in found.nodes:
        assert set(node.parents) <= seen
        seen.add(node.name)
    assert seen == {*dag, *(name for nexts in dag.values() for name in nexts)}
    assert found.leaves
    assert all(leaf not in node.parents for leaf in found.leaves for node in found.nodes)


def test_the_functions_of_a_handler_are_known_without_running_it() -> None:
    code = "import json, a.b\nfrom c import d as e\ndef f(x, y):\n  g = 1\nh = i = f\nclass J: pass\nf(h, 1)\n'text'"
    assert functions_of(code) == {"json", "a", "e", "f", "h", "i", "J"}
    assert functions_of("from x import *") is None
    assert functions_of("try:\n  import f\nexcept ImportError: f = None") is None, "only running it would tell"
    with pytest.raises(SpecError, match="the workflow's handler is no Python"):
        functions_of("def f(:")


# archives


def folder_of(path: Path, **options: Any) -> Path:
    for name, content in archives.war_files(FUNCTIONS, SPEC, **options).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def test_a_workflow_is_read_from_a_zip_a_folder_and_a_tar_with_a_top_folder(tmp_path: Path) -> None:
    archives.war(tmp_path / "a.war", FUNCTIONS, SPEC)
    folder_of(tmp_path / "b")
    folder_of(tmp_path / "c", manifest="MAR-INF/MANIFEST.json")
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "b", "top")
    for name in ("a.war", "b", "c", "d.tar.gz"):
        into = tmp_path / f"into-{name}"
        into.mkdir()
        found = archive.unpack(tmp_path / name, into)
        assert (found.name, found.handler, found.spec.leaves) == ("flow", "functions.py", ("join",)), name
        assert len(found.digest) == 64
        assert (found.folder / "functions.py").is_file()


def test_an_archive_of_a_workflow_that_is_hostile_or_torn_is_refused_by_name(tmp_path: Path) -> None:
    def refused(words: str, change: Callable[[dict[str, bytes]], object]) -> None:
        import zipfile

        contents = archives.war_files(FUNCTIONS, SPEC)
        change(contents)
        with zipfile.ZipFile(tmp_path / "x.war", "w") as packed:
            for name, content in contents.items():
                packed.writestr(name, content)
        with tempfile.TemporaryDirectory() as into, pytest.raises(ArchiveError, match=words):
            archive.unpack(tmp_path / "x.war", Path(into))

    told = "WAR-INF/MANIFEST.json"
    refused("leaves the archive's folder", lambda files: files.update({"../out.py": b""}))
    refused(f"has no {told}: it is no workflow archive", lambda files: files.pop(told))
    refused("the manifest is none of a workflow", lambda files: files.update({told: b'{"workflow": {}}'}))
    refused("names the file 'spec.yaml', which the archive does not hold", lambda files: files.pop("spec.yaml"))
    refused("names the file 'functions.py'", lambda files: files.pop("functions.py"))
    refused("is no YAML of plain values", lambda files: files.update({"spec.yaml": b"!!python/object:os.system {}"}))
    refused("'models' of the specification is to be a mapping", lambda files: files.update({"spec.yaml": b"a: 1"}))
    refused("neither a model", lambda files: files.update({"functions.py": b"def other(data, context): ..."}))
    escape = json.dumps({"workflow": {"workflowName": "w", "specFile": "../../etc/passwd"}}).encode()
    refused("which the archive does not hold", lambda files: files.update({told: escape}))


def test_a_workflow_in_the_store_is_no_model_of_it(tmp_path: Path) -> None:
    archives.war(tmp_path / "a.war", FUNCTIONS, SPEC)
    folder_of(tmp_path / "b", manifest="MAR-INF/MANIFEST.json")
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as packed:
        packed.add(folder_of(tmp_path / "d"), "top")
    archives.mar(tmp_path / "m.mar", modelName="m")
    assert [entry.model for entry in Store(tmp_path, name_in_store).entries()] == ["m"]
    with pytest.raises(HoldsWorkflow, match="register it at /workflows"):
        peek(tmp_path / "c.tar.gz")


# workflows that run


class WorkflowApp:
    """Fleet, workflows and both faces over a store, without a socket; the handlers' processes are real."""

    def __init__(
        self, folder: Path, loop: asyncio.AbstractEventLoop, *, code: bool = True, strict: bool = False
    ) -> None:
        self.loop = loop
        self.folder = folder
        self.state = folder / "served.json"
        store = Store(folder, name_in_store)
        limits = Limits() if code else None

        async def find(url: str) -> ResolvedSource:
            return ResolvedSource(path=store.find(url))

        self.models = Models()
        loader = ArchiveLoader(VersionOptions(), limits, loop, self.in_thread)
        self.fleet = Fleet(self.models, loop, self.in_thread, state=self.state, loaders=[loader])
        self.workflows = Workflows(
            self.fleet, loop, self.in_thread, find, store=store, state=self.state, handlers=limits
        )
        self.management = Management(self.fleet, store, find, loop, None, self.workflows)
        extension = TorchServe(self.management, self.workflows, strict=strict)
        self.routes = Routes(self.models, loop, extension=extension)
        self.follower = StateFollower(self.fleet, self.state, find, None, self.workflows)

    def in_thread(self, work: Callable[[], Any]) -> Awaitable[Any]:
        return self.loop.run_in_executor(None, work)

    async def manage(self, method: str, target: str, content: bytes = b"", **headers: str) -> tuple[int, Any]:
        return await self._ask(self.management, method, target, content, headers)

    async def ask(self, method: str, target: str, content: bytes = b"", **headers: str) -> tuple[int, Any]:
        return await self._ask(self.routes, method, target, content, headers)

    async def _ask(
        self, app: Any, method: str, target: str, content: bytes, headers: dict[str, str]
    ) -> tuple[int, Any]:
        named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        found = app.answer(Request(method, target.encode(), named, content))
        response: Response = found if isinstance(found, Response) else await found
        return response.status, json.loads(response.body) if response.body else None

    def begin(self, content: bytes = b"") -> asyncio.Future[Response]:
        """A request to the workflow `flow`, under way."""
        found = self.routes.answer(Request("POST", b"/wfpredict/flow", {}, content))
        assert isinstance(found, asyncio.Future)
        return found

    async def close(self) -> None:
        await self.fleet.close()
        await self.workflows.close()


Act = Callable[[WorkflowApp], Awaitable[None]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of two models and the workflow of them; archives are laid out in the folder beside it."""
    (tmp_path / "laid-out").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "laid-out"))
    folder = tmp_path / "store"
    folder.mkdir()
    archives.mar(folder / "double.mar", TIMES % (2, 2), modelName="doubler", modelVersion="2.0")
    archives.mar(folder / "triple.mar", TIMES % (3, 3), modelName="tripler")
    archives.mar(folder / "broken.mar", "import no_such_module", modelName="broken")
    archives.war(folder / "flow.war", FUNCTIONS, SPEC)
    return folder


def run(folder: Path, act: Act, **options: Any) -> None:
    async def whole() -> None:
        app = WorkflowApp(folder, asyncio.get_running_loop(), **options)
        try:
            await asyncio.wait_for(act(app), 200)
        finally:
            await app.close()

    asyncio.run(whole())


def laid_out(folder: Path) -> list[Path]:
    """What lies in the folders of archives that are served."""
    return list((folder.parent / "laid-out").glob("trueline-archive-*"))


def one_function(code: str, **settings: Any) -> tuple[str, str]:
    """Code and specification of a workflow of one function, `only`."""
    return code, yaml.safe_dump({"models": settings, "dag": {"only": []}})


@pytest.mark.slow
def test_a_workflow_of_several_ends_answers_their_texts_by_node(store: Path) -> None:
    code = "".join(f"def {name}(data, context): return ['{name}' if data else '']\n" for name in "abc")
    archives.war(store / "ends.war", code, yaml.safe_dump({"models": {}, "dag": {"a": ["b", "c"]}}))

    async def act(app: WorkflowApp) -> None:
        status, _ = await app.manage("POST", "/workflows?url=ends.war&workflow_name=ends")
        assert status == 200
        assert await app.ask("POST", "/wfpredict/ends", b"x") == (200, {"b": "b", "c": "c"})

    run(store, act)


@pytest.mark.slow
def test_a_workflow_is_registered_asked_described_and_unregistered_in_torchserves_words(store: Path) -> None:
    async def act(app: WorkflowApp) -> None:
        told = await app.manage("POST", "/workflows?url=flow.war&workflow_name=six")
        assert told == (200, {"status": "Workflow six has been registered and scaled successfully."})
        answer = {"double": {"times": 2, "is": 14}, "triple": {"times": 3, "is": 21}}
        assert await app.ask("POST", "/wfpredict/six", b"7") == (200, answer)
        form = {"content_type": "application/x-www-form-urlencoded"}
        assert await app.ask("PUT", "/wfpredict/six", b"data=7", **form) == (200, answer)
        assert await app.ask("POST", "/predictions/six__double", b'{"x": 1}') == (200, {"times": 2, "is": 2})
        assert await app.manage("GET", "/workflows") == (
            200,
            {"workflows": [{"workflowName": "six", "workflowUrl": "flow.war"}]},
        )
        assert await app.manage("GET", "/workflows/six") == (
            200,
            [
                {
                    "workflowName": "six",
                    "workflowUrl": "flow.war",
                    "minWorkers": 1,
                    "maxWorkers": 1,
                    "batchSize": 4,
                    "maxBatchDelay": 0,
                    "workflowDag": "{pre=[double, triple], double=[join], triple=[join]}",
                }
            ],
        )
        _, models = await app.manage("GET", "/models")
        assert [one["modelName"] for one in models["models"]] == ["six__double", "six__triple"], "no functions"
        _, facts = await app.manage("GET", "/models/six__double")
        assert (facts[0]["modelVersion"], facts[0]["batchSize"]) == ("2.0", 4)
        again = await app.manage("POST", "/workflows?url=flow.war&workflow_name=six")
        assert (again[0], again[1]["message"]) == (409, "Workflow six is already registered.")
        _, document = await app.ask("GET", "/openapi.json")
        assert "/wfpredict/six" in document["paths"]
        gone = await app.manage("DELETE", "/workflows/six")
        assert gone == (200, {"status": 'Workflow "six" unregistered'})
        assert (app.models.names(), laid_out(store)) == ([], [])
        for method, path in (("GET", "/workflows/six"), ("DELETE", "/workflows/six")):
            status, said = await app.manage(method, path)
            assert (status, said["type"]) == (404, "WorkflowNotFoundException")
            assert said["message"] == "Workflow not found: six"
        assert (await app.ask("GET", "/wfpredict/six"))[0] == 404

    run(store, act)


@pytest.mark.jobs
@pytest.mark.slow
def test_a_workflow_of_which_one_node_fails_leaves_nothing_behind(store: Path) -> None:
    broken = "models: {ok: {url: double.mar}, bad: {url: broken.mar}}\ndag: {pre: [ok], ok: [bad]}"
    absent = "models: {ok: {url: double.mar}, bad: {url: absent.mar}}\ndag: {pre: [ok], ok: [bad]}"
    archives.war(store / "broken.war", FUNCTIONS, broken)
    archives.war(store / "absent.war", FUNCTIONS, absent)
    archives.war(store / "late.war", "try:\n    x = 1\nexcept ImportError: pass\n", "models: {}\ndag: {pre: []}")

    async def act(app: WorkflowApp) -> None:
        status, said = await app.manage("POST", "/workflows?url=broken.war")
        assert (status, said["type"]) == (500, "InternalServerException")
        assert said["message"].startswith(
            "Workflow flow has failed to register. Failures: [Workflow Node flow__bad failed to register. Details: "
            "Failed to start workers for model flow__bad version: 1.0: "
        )
        assert "no_such_module" in said["message"]
        status, said = await app.manage("POST", "/workflows?url=absent.war")
        assert (status, said["type"]) == (400, "BadRequestException")
        assert "flow__bad failed to register. Details: Model not found at: absent.mar" in said["message"]
        status, said = await app.manage("POST", "/workflows?url=late.war")
        assert status == 500
        assert "has no function 'pre'" in said["message"]
        assert (app.models.names(), app.workflows.names(), laid_out(store)) == ([], [], [])
        assert desired_state.read(app.state) == desired_state.DesiredState()
        assert (await app.manage("POST", "/workflows?url=flow.war"))[0] == 200, "the name is free"

    run(store, act)


def test_a_registration_that_cannot_be_is_the_clients_fault_and_runs_nothing(store: Path) -> None:
    (store / "folder").mkdir()
    (store / "torn.war").write_bytes(b"PK\x03\x04torn")
    archives.war(store / "circle.war", FUNCTIONS, "models: {}\ndag: {pre: [join], join: [pre]}")
    archives.war(store / "named.war", FUNCTIONS, SPEC, name="../up")
    marker = store / "ran"
    archives.war(
        store / "runs.war", f"open({str(marker)!r}, 'w')\ndef only(data, context): ...", "models: {}\ndag: {zz: []}"
    )

    async def act(app: WorkflowApp) -> None:
        for query, code, words in (
            ("", 400, "Parameter url is required."),
            ("?url=", 404, "empty url"),
            ("?url=nope.war", 404, "Workflow not found in workflow store: nope.war"),
            ("?url=..%2Ffake.war", 404, "Relative path is not allowed in url: ../fake.war"),
            ("?url=malformed_url,%3F", 404, "Relative path is not allowed in url: malformed_url,?"),
            ("?url=https://host/x.war", 404, "Given URL https://host/x.war does not match any allowed URL(s)"),
            ("?url=torn.war", 400, "'torn.war' is torn, or neither a zip nor a tar.gz"),
            ("?url=folder", 400, "'folder' has no WAR-INF/MANIFEST.json: it is no workflow archive"),
            ("?url=circle.war", 400, "the dag goes in a circle: "),
            ("?url=double.mar", 400, "the manifest is none of a workflow: "),
            ("?url=named.war", 400, "workflow '../up' is no name here"),
            ("?url=flow.war&workflow_name=a/b", 400, "workflow 'a/b' is no name here"),
            ("?url=runs.war", 400, "node 'zz' of the dag is neither a model"),
        ):
            status, said = await app.manage("POST", f"/workflows{query}")
            assert (status, said["message"].startswith(words)) == (code, True), said
        status, said = await app.manage("POST", "/workflows", b"[1]", content_type="application/json")
        assert (status, said["type"]) == (400, "BadRequestException")
        assert (await app.manage("PATCH", "/workflows"))[0] == 405
        assert (await app.manage("POST", "/workflows/a"))[0] == 405
        assert (await app.ask("DELETE", "/wfpredict/a"))[0] == 405
        assert laid_out(store) == []

    run(store, act)
    assert not marker.exists()


def test_without_allow_code_a_workflow_is_refused_and_nothing_of_it_is_unpacked(store: Path) -> None:
    async def act(app: WorkflowApp) -> None:
        status, said = await app.manage("POST", "/workflows?url=flow.war")
        assert (status, said["type"]) == (403, "ModelException")
        assert "this server runs none; start it with --allow-code" in said["message"]
        assert laid_out(store) == []

    run(store, act, code=False)


@pytest.mark.jobs
@pytest.mark.slow
def test_a_node_of_a_workflow_changes_with_the_workflow_alone(store: Path) -> None:
    async def act(app: WorkflowApp) -> None:
        await app.manage("POST", "/workflows?url=flow.war")
        for method, target in (
            ("DELETE", "/models/flow__double"),
            ("DELETE", "/models/flow__pre/1.0"),
            ("PUT", "/models/flow__double?min_worker=2"),
            ("PUT", "/models/flow__double/2.0/set-default"),
            ("POST", "/models?url=double.mar&model_name=flow__double&model_version=9"),
        ):
            status, said = await app.manage(method, target)
            assert status == 409, (target, said)
            assert "is a node of workflow 'flow'; unregister the workflow (DELETE /workflows/flow)" in said["message"]
        await app.manage("POST", "/models?url=double.mar&model_name=other__double&initial_workers=1")
        status, said = await app.manage("POST", "/workflows?url=flow.war&workflow_name=other")
        assert (status, "model 'other__double' is served already" in said["message"]) == (409, True)
        assert app.workflows.names() == ["flow"]
        assert (await app.ask("POST", "/wfpredict/flow", b"1"))[0] == 200

    run(store, act)


@pytest.mark.jobs
@pytest.mark.slow
def test_a_node_that_fails_is_asked_again_and_then_the_request_fails_with_its_name(store: Path) -> None:
    asked = store / "asked"
    code, text = one_function(
        f"""
        from ts.utils.util import PredictionException

        def only(data, context):
            if data is None:
                return None
            with open({str(asked)!r}, "a") as log:
                log.write("x")
            if data[0]["body"] == b"refuse":
                raise PredictionException("no such breed", 404)
            if data[0]["body"] == b"exit":
                import os
                os._exit(3)
            if len(open({str(asked)!r}).read()) < int(bytes(data[0]["body"])):
                raise ValueError("not yet")
            return [b"\\xff\\xd8"]
        """,
        **{"retry-attempts": 2},
    )
    archives.war(store / "only.war", code, text)

    def counted() -> int:
        found = len(asked.read_text())
        asked.write_text("")
        return found

    async def act(app: WorkflowApp) -> None:
        await app.manage("POST", "/workflows?url=only.war")
        response = await app.begin(b"3")
        assert (response.status, response.body, response.content_type) == (200, b"\xff\xd8", b"application/json")
        assert counted() == 3
        failed = {"code": 500, "type": "InternalServerException", "message": "Error executing only"}
        assert (await app.ask("POST", "/wfpredict/flow", b"9"), counted()) == ((500, failed), 3)
        refusal = {"code": 404, "type": "InternalServerException", "message": "no such breed"}
        assert (await app.ask("POST", "/wfpredict/flow", b"refuse"), counted()) == ((404, refusal), 1)
        assert await app.ask("POST", "/wfpredict/flow", b"exit") == (500, failed)
        assert counted() == 3, "each attempt waits for the worker that takes the place of the dead"

    async def as_torchserve(app: WorkflowApp) -> None:
        await app.manage("POST", "/workflows?url=only.war")
        assert (await app.ask("POST", "/wfpredict/flow", b"refuse"))[0] == 500

    run(store, act)
    run(store, as_torchserve, strict=True)


@pytest.mark.jobs
@pytest.mark.slow
def test_a_node_that_takes_longer_than_its_timeout_fails_the_request_and_what_follows_is_not_asked(store: Path) -> None:
    late = store / "late"
    code = f"""
        import time

        def hang(data, context):
            if data is not None:
                time.sleep(600)

        def quick(data, context):
            return None if data is None else ["quick"]

        def start(data, context):
            return None if data is None else ["start"]

        def join(data, context):
            if data is not None:
                open({str(late)!r}, "w")
                return ["joined"]
    """
    text = "models: {timeout-ms: 1000, retry-attempts: 1}\ndag: {start: [hang, quick], hang: [join], quick: [join]}"
    archives.war(store / "late.war", code, text)

    async def act(app: WorkflowApp) -> None:
        await app.manage("POST", "/workflows?url=late.war")
        status, said = await app.ask("POST", "/wfpredict/flow", b"")
        assert (status, said["message"]) == (500, "Error executing hang")
        pool = app.workflows.find("flow").versions["hang"].pool
        assert pool.num_waiting == 0, "the second attempt has left the queue"

    run(store, act)
    assert not late.exists()


def gate(store: Path) -> tuple[Path, Path]:
    """A workflow `flow` whose first function tells one pipe that it runs and waits for the other; the second leaves a
    file.
    """
    began, go = store / "began", store / "go"
    os.mkfifo(began)
    os.mkfifo(go)
    code = f"""
        def first(data, context):
            if data is not None:
                with open({str(began)!r}, "w"):
                    pass
                with open({str(go)!r}):
                    return ["first"]

        def second(data, context):
            if data is not None:
                open({str(store / "second")!r}, "w")
                return [bytes(data[0]["body"]) + b", second"]
    """
    archives.war(store / "gate.war", code, "models: {timeout-ms: 60000}\ndag: {first: [second]}")
    return began, go


@pytest.mark.slow
def test_a_client_that_goes_away_withdraws_its_request_from_every_node(store: Path) -> None:
    began, go = gate(store)

    async def act(app: WorkflowApp) -> None:
        await app.manage("POST", "/workflows?url=gate.war")
        answer = app.begin()
        await app.in_thread(began.read_bytes)
        waiting = app.begin()
        pool = app.workflows.find("flow").versions["first"].pool
        while not pool.num_waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        answer.cancel()
        while pool.num_waiting:
            await asyncio.sleep(0)
        await app.in_thread(lambda: go.write_bytes(b""))
        assert (await app.manage("DELETE", "/workflows/flow"))[0] == 200, "it waits for whatever is under way"

    run(store, act)
    assert not (store / "second").exists()


@pytest.mark.slow
def test_what_is_under_way_is_answered_when_its_workflow_is_unregistered(store: Path) -> None:
    began, go = gate(store)

    async def act(app: WorkflowApp) -> None:
        await app.manage("POST", "/workflows?url=gate.war")
        answer = app.begin()
        await app.in_thread(began.read_bytes)
        gone = asyncio.ensure_future(app.manage("DELETE", "/workflows/flow"))
        while app.workflows.names():
            await asyncio.sleep(0)
        assert (await app.ask("POST", "/wfpredict/flow"))[0] == 404
        assert not gone.done()
        await app.in_thread(lambda: go.write_bytes(b""))
        assert (await answer).body == b"first, second"
        assert (await gone)[0] == 200

    run(store, act)


@pytest.mark.jobs
@pytest.mark.slow
def test_a_restart_brings_workflows_back_and_one_that_was_exchanged_is_wanted_on(store: Path) -> None:
    async def first(app: WorkflowApp) -> None:
        await app.manage("POST", "/workflows?url=flow.war&response_timeout=77")
        told = desired_state.read(app.state)
        assert told.models == {}, "nodes come with their workflow"
        assert set(told.workflows["flow"].models) == {"double", "triple"}
        assert told.workflows["flow"].given == {"response_timeout": "77"}

    async def second(app: WorkflowApp) -> None:
        assert await app.workflows.restore(desired_state.read(app.state)) == []
        assert (await app.ask("POST", "/wfpredict/flow", b"1"))[0] == 200
        assert (await app.manage("GET", "/models/flow__join"))[1][0]["responseTimeout"] == 77

    async def third(app: WorkflowApp) -> None:
        before = app.state.read_bytes()
        archives.mar(store / "double.mar", TIMES % (4, 4), modelName="doubler")
        (missing,) = await app.workflows.restore(desired_state.read(app.state))
        assert "flow__double failed to register. Details: the archive of digest" in missing
        status, said = await app.ask("POST", "/wfpredict/flow", b"1")
        assert (status, said["message"].startswith("workflow 'flow' is failed: ")) == (503, True)
        assert (await app.ask("GET", "/ping"))[0] == 500
        assert (await app.manage("GET", "/workflows"))[1]["workflows"][0]["workflowName"] == "flow"
        assert app.state.read_bytes() == before, "it is wanted on"
        assert (await app.manage("POST", "/workflows?url=flow.war"))[0] == 200
        assert (await app.ask("POST", "/wfpredict/flow", b"1"))[1]["double"]["times"] == 4
        assert (await app.ask("GET", "/ping"))[0] == 200

    for act in (first, second, third):
        run(store, act)


@pytest.mark.jobs
@pytest.mark.slow
def test_what_one_process_is_told_of_workflows_reaches_the_other(store: Path) -> None:
    async def act(one: WorkflowApp) -> None:
        other = WorkflowApp(store, one.loop)
        try:
            await one.manage("POST", "/workflows?url=flow.war")
            await other.follower.look()
            assert (await other.ask("POST", "/wfpredict/flow", b"5"))[1]["double"]["is"] == 10
            await other.manage("POST", "/models?url=triple.mar&initial_workers=1")
            assert set(desired_state.read(one.state).workflows) == {"flow"}, (
                "acts on models leave workflows as they are"
            )
            before = one.state.read_bytes()
            await one.follower.look()
            await other.follower.look()
            assert one.state.read_bytes() == before
            archives.war(store / "again.war", FUNCTIONS, SPEC.replace("timeout-ms: 60000", "timeout-ms: 9000"))
            await one.manage("DELETE", "/workflows/flow")
            await one.manage("POST", "/workflows?url=again.war")
            await other.follower.look()
            assert other.workflows.find("flow").registered.source == "again.war", "it has taken the place of the other"
            assert (await other.ask("POST", "/wfpredict/flow", b"5"))[0] == 200
            await one.manage("DELETE", "/workflows/flow")
            await other.follower.look()
            assert (other.workflows.names(), (await other.ask("POST", "/wfpredict/flow"))[0]) == ([], 404)
        finally:
            await other.close()

    run(store, act)


@pytest.mark.slow
def test_an_act_on_a_workflow_that_cannot_be_written_is_undone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, **_: int) -> None:
        raise StorageError("no room left")

    async def act(app: WorkflowApp) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("trueline.files.write_atomic", full)
            assert (await app.manage("POST", "/workflows?url=flow.war"))[0] == 503
            assert (app.workflows.names(), app.models.names(), laid_out(store)) == ([], [], [])
        assert (await app.manage("POST", "/workflows?url=flow.war"))[0] == 200
        with monkeypatch.context() as patched:
            patched.setattr("trueline.files.write_atomic", full)
            assert (await app.manage("DELETE", "/workflows/flow"))[0] == 503
        assert (await app.ask("POST", "/wfpredict/flow", b"1"))[0] == 200
        assert set(app.models.names()) == {"flow__pre", "flow__double", "flow__triple", "flow__join"}

    run(store, act)


@pytest.mark.slow
@pytest.mark.long
def test_a_torchserve_client_finds_its_workflows_on_a_real_server_of_two_processes(store: Path) -> None:
    state = str(store.parent / "served.json")
    workflows = store.parent / "workflows"
    workflows.mkdir()
    (store / "flow.war").rename(workflows / "flow.war")

    def start() -> RunningServer:
        return serve.start(
            model_store=str(store),
            workflow_store=str(workflows),
            state=state,
            management_port=0,
            allow_code=True,
            processes=2,
        )

    def ask(url: str) -> set[Any]:
        """What new connections are told, each by the process that it reaches."""
        answers = [servers.post(f"{url}/wfpredict/flow", content=b"4") for _ in range(8)]
        return {(one.status_code, one.text if one.status_code == 200 else "") for one in answers}

    joined = json.dumps({"double": {"times": 2, "is": 8}, "triple": {"times": 3, "is": 12}}, indent=2)
    with start() as running:
        told = servers.post(f"{running.management_url}/workflows", params={"url": "flow.war"})
        assert told.json() == {"status": "Workflow flow has been registered and scaled successfully."}
        servers.eventually(lambda: ask(running.url) == {(200, joined)})
        answer = servers.post(f"{running.url}/wfpredict/flow", files={"data": b"4"})
        assert (answer.text, answer.headers["content-type"]) == (joined, "application/json")
        assert answer.headers["x-request-id"]
        unknown = servers.get(f"{running.url}/wfpredict/InvalidModel")
        assert unknown.json() == {
            "code": 404,
            "type": "WorkflowNotFoundException",
            "message": "Workflow not found: InvalidModel",
        }
    with start() as again:
        assert ask(again.url) == {(200, joined)}
        gone = servers.delete(f"{again.management_url}/workflows/flow")
        assert gone.json() == {"status": 'Workflow "flow" unregistered'}
        servers.eventually(lambda: ask(again.url) == {(404, "")})
    assert "workflows" not in json.loads(Path(state).read_text())


@pytest.mark.slow
def test_a_workflow_that_is_being_restored_is_503_with_retry_after_and_the_server_is_not_ready(store: Path) -> None:
    async def first(app: WorkflowApp) -> None:
        assert (await app.manage("POST", "/workflows?url=flow.war"))[0] == 200

    async def second(app: WorkflowApp) -> None:
        async def ask() -> Response:
            found = app.routes.answer(Request("POST", b"/wfpredict/flow", {}, b"1"))
            return found if isinstance(found, Response) else await found

        app.models.locating = True
        before = await ask()  # the state file has not been read yet
        app.models.started = True
        app.models.locating = False
        restoring = asyncio.ensure_future(app.workflows.restore(desired_state.read(app.state)))
        await asyncio.sleep(0)
        for response in (before, await ask()):
            assert (response.status, response.headers.endswith(b"retry-after: 1\r\n")) == (503, True)
            assert json.loads(response.body)["message"] == "workflow 'flow' is loading"
        assert app.routes.dispatch.ready is False
        assert (await app.ask("POST", "/wfpredict/other"))[0] == 404
        assert await restoring == []
        assert (await ask()).status == 200
        assert app.routes.dispatch.ready is True

    run(store, first)
    run(store, second)


@pytest.mark.slow
@pytest.mark.parametrize("archive_of", few(["flow.war", "double.mar"], 1, pytest.mark.jobs))
def test_a_workflow_that_a_full_disk_kept_from_being_restored_is_503_and_restored_once_there_is_room(
    store: Path, monkeypatch: pytest.MonkeyPatch, archive_of: str
) -> None:
    async def first(app: WorkflowApp) -> None:
        assert (await app.manage("POST", "/workflows?url=flow.war"))[0] == 200

    async def second(app: WorkflowApp) -> None:
        real = packed.lay_out

        def lay_out(path: Path, into: Path, caps: Any = None) -> str:
            if path.name == archive_of:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(path, into, caps)

        await app.follower.look()  # served as the file says
        await app.manage("DELETE", "/workflows/flow")
        with monkeypatch.context() as full:
            full.setattr(packed, "lay_out", lay_out)
            registered, said = await app.manage("POST", "/workflows?url=flow.war")
            assert (registered, said["type"]) == (507, "InternalServerException")
            app.state.write_bytes(kept)
            (missing,) = await app.workflows.restore(desired_state.read(app.state))
            assert "No space left on device" in missing
            response = app.routes.answer(Request("POST", b"/wfpredict/flow", {}, b"1"))
            assert isinstance(response, Response)
            assert (response.status, response.headers.endswith(b"retry-after: 10\r\n")) == (503, True)
            await app.follower.retry()
            await app.follower.look()
            assert app.workflows.names() == []
        await app.follower.retry()
        await app.follower.look()
        assert (await app.ask("POST", "/wfpredict/flow", b"1"))[0] == 200
        assert app.state.read_bytes() == kept

    run(store, first)
    kept = (store / "served.json").read_bytes()
    run(store, second)
