"""The command says one clear thing for each outcome, keeps data apart from progress, and starts at once."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trueline import cli, events
from trueline.cli import app, options
from trueline.cli._progress import Sparse, StepPace, detail, progress, read_count
from trueline.cli.jobs._launch import parse_fault
from trueline.cli.jobs.status import format_status
from trueline.cli.line.register import run_facts
from trueline.errors import RecipeError, UsageError
from worlds import bundles


@pytest.fixture(autouse=True)
def _no_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.DEBUG, "0")


@pytest.mark.parametrize("path", app.known_tables(), ids=" ".join)
def test_every_verb_teaches_with_two_examples_and_names_its_options(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name = " ".join(path)
    assert app.run([*path, "--help"]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(f"\n    trueline {name}[ \n]", said)) >= 2
    assert "Examples:" in said
    assert "--debug" in said
    paragraph = said.partition("Options:")[0]
    assert len(paragraph.split()) > 30


def test_help_lists_the_verbs_in_the_order_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--help"]) == 0
    said = capsys.readouterr().out
    places = [said.index(f"\n  {name} ") for group in app.VERBS.values() for name in group]
    places += [said.index(f"\n{heading}:") for heading in app.VERBS]
    verbs, headings = places[: -len(app.VERBS)], places[-len(app.VERBS) :]
    assert verbs == sorted(verbs)
    assert headings == sorted(headings)
    assert "..." not in said.partition("The line:")[2]


def test_an_old_or_misspelt_verb_is_told_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["verify", "b"]) == 2
    assert "did you mean 'bundle verify'?" in capsys.readouterr().err
    assert app.run(["bundle", "inspekt", "b"]) == 2
    assert "did you mean 'inspect'?" in capsys.readouterr().err


def test_help_loads_little_and_neither_torch_nor_mlflow() -> None:
    code = (
        "import sys; from trueline.cli.app import run; run(['--help']);"
        "heavy = {'torch', 'mlflow', 'numpy', 'pyarrow', 'onnxruntime', 'grpc'} & set(sys.modules);"
        "assert not heavy, heavy; assert len(sys.modules) < 200, len(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_end_of_a_command_does_not_look_through_what_it_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["trueline", "--help"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert gc.freeze in at_exit


def test_a_trueline_error_is_one_line_and_a_hint_on_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert app.run(["evaluate", str(tmp_path / "absent.py"), "x"]) == RecipeError.exit_code
    said = capsys.readouterr()
    assert said.out == ""
    error, hint = said.err.splitlines()
    assert error.startswith("error: cannot read the recipe")
    assert hint.startswith("hint: `trueline init")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "did you mean 'train'?"),
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "r.py", "--epoch", "3"], "--epochs"),
        (["train", "r.py", "--kill", "soon"], "is not STEP or STEP:WORKER"),
        (["register", "b", "--metric", "accuracy"], "is not NAME=VALUE"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert app.run(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


def failing(error: BaseException) -> Any:
    def command(name: str, into: Path) -> Any:
        raise error

    return command


def test_an_unexpected_error_is_short_and_shows_its_traceback_only_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trueline.recipe.template.write_recipe", failing(ZeroDivisionError("no way")))
    assert app.run(["init", "x"]) == 1
    short = capsys.readouterr().err
    assert short.startswith("error: unexpected ZeroDivisionError at test_cli.py:")
    assert "Traceback" not in short
    assert app.run(["init", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_exits_with_130_and_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trueline.recipe.template.write_recipe", failing(KeyboardInterrupt()))
    assert app.run(["init", "x"]) == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err


ENDINGS = {
    "in the code of a dataclass that is made": """
def interrupted(arguments):
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return 130
""",
    "while the interpreter clears its modules": """
class Last:
    def __del__(self, kill=os.kill, this=os.getpid(), number=signal.SIGINT):
        kill(this, number)

sys.last = Last()

def interrupted(arguments):
    return 130
""",
}


@pytest.mark.parametrize("program", ENDINGS.values(), ids=ENDINGS)
def test_an_interrupt_that_was_caught_ends_with_the_exit_code_of_the_command(tmp_path: Path, program: str) -> None:
    imports = "import os, signal, sys\nfrom trueline.cli import app, main\n"
    (tmp_path / "interrupted_command.py").write_text(f"{imports}{program}\napp.run = interrupted\nmain()\n")
    command = [sys.executable, "-m", "interrupted_command"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


def test_a_reader_that_went_away_is_no_traceback() -> None:
    command = [sys.executable, "-m", "trueline", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (found.returncode, found.stderr) == (1, "")


def test_init_says_the_path_on_stdout_and_the_next_step_on_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert app.run(["init", "mine", "--into", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'mine' / 'recipe.py'}\n"
    assert f"trueline train {tmp_path / 'mine' / 'recipe.py'}" in said.err
    assert app.run(["init", "mine", "--into", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err


def called(monkeypatch: pytest.MonkeyPatch, where: str, answer: Any) -> dict[str, Any]:
    """Puts a function in place of the verb's and returns what it will be called with."""
    seen: dict[str, Any] = {}

    def fake(*args: Any, **kwargs: Any) -> Any:
        seen.update(kwargs, args=args)
        return answer

    monkeypatch.setattr(where, fake)
    return seen


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a job's run: one step, and its result."""
    pytest.importorskip("torch")
    summary = SimpleNamespace(as_text=lambda: "trained", as_dict=lambda: {"steps": 3}, left_out=0)
    monkeypatch.setattr("trueline.train.api.summary", summary, raising=False)

    def fake(folder: Path, early: object = None) -> Any:
        events.emit("step.applied", step=0, total=1, loss=0.5)
        return SimpleNamespace(summary=summary, checkpoint=Path("c"), chosen=Path("b"), job_dir=folder)

    monkeypatch.setattr("trueline.train.api.launch", fake)


@pytest.mark.usefixtures("launched")
def test_train_passes_its_flags_and_says_the_summary_as_text_or_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = called(monkeypatch, "trueline.train.api.prepare", Path("j"))
    assert app.run(["train", "r.py", "--workers", "2:4", "--batch", "32", "--kill", "5:1", "--kill", "9"]) == 0
    said = capsys.readouterr()
    assert said.out == "trained\ncheckpoint: c\nthe best one, which stands for the job: b\n"
    assert said.err == "training 1/1 loss=0.5\n"
    assert (seen["args"], seen["workers"], seen["global_batch"], seen["epochs"]) == (("r.py",), "2:4", 32, None)
    assert [(fault.step, fault.slot) for fault in seen["faults"]] == [(5, 1), (9, 0)]
    assert app.run(["train", "r.py", "--json", "--quiet", "--bitwise", "--no-compile", "--clip-norm", "1"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"steps": 3, "checkpoint": "c", "chosen": "b", "job": "j", "left_out": 0}
    assert said.err == ""
    assert (seen["bitwise"], seen["compile"], seen["clip_norm"], seen["autoscale"]) == (True, False, 1.0, None)


@pytest.mark.usefixtures("launched")
def test_a_job_that_left_records_out_has_an_exit_code_of_its_own_and_says_how_many(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called(monkeypatch, "trueline.train.api.prepare", Path("j"))
    import trueline.train.api as api

    monkeypatch.setattr(api.summary, "left_out", 84)  # type: ignore[attr-defined]  # of `launched`
    assert app.run(["train", "r.py", "--json", "--quiet"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out)["left_out"] == 84
    assert "84 records were left out of the training" in said.err
    assert "left out" in app.EXIT_CODES[3] or "without records" in app.EXIT_CODES[3]


def test_the_options_of_train_are_settings_of_a_job() -> None:
    from trueline.cli.line.train import command
    from trueline.train.settings import Overrides

    ours = {"recipe", "workers", "job_dir", "resume", "detach", "kills", "debug", "as_json", "quiet"}
    ours |= {"mlflow", "tracking_uri", "trackers", "qat"}
    assert {param.name for param in command.params} - ours == set(Overrides.__annotations__)


@pytest.mark.usefixtures("launched")
def test_run_and_resume_pass_what_follows_to_whom_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = called(monkeypatch, "trueline.train.api.prepare_script", Path("j"))
    assert app.run(["run", "loop.py", "--workers", "2", "--kill", "40:1", "-q", "--", "--lr", "0.1"]) == 0
    assert (seen["args"], seen["workers"]) == (("loop.py", ("--lr", "0.1")), "2")
    assert [(fault.step, fault.slot) for fault in seen["faults"]] == [(40, 1)]
    monkeypatch.setattr("trueline.train.launch.jobs.find_job", Path)
    monkeypatch.setattr("trueline.cli.jobs.resume._begin_agent", lambda *_, **__: contextlib.nullcontext())
    seen = called(monkeypatch, "trueline.train.api.prepare_resume", Path("j"))
    assert app.run(["resume", "digits-1", "--keep", "2", "-q"]) == 0
    assert (seen["args"], seen["keep"], seen["workers"]) == ((Path("digits-1"),), 2, None)


def test_scale_and_status_say_what_the_master_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trueline.train.launch.jobs.find_job", Path)
    seen = called(monkeypatch, "trueline.train.launch.jobs.scale", None)
    assert app.run(["scale", "digits-1", "5"]) == 0
    assert seen["args"] == (Path("digits-1"), 5)
    assert capsys.readouterr().out == "digits-1: 5 workers from now on\n"


def test_a_status_shows_members_and_whom_to_look_at() -> None:
    member = {"ref": "worker-0.0", "steps": 7, "phase": "computing", "rate": 512.4, "since": 0.25}
    live = {"workers": 3, "members": [member], "pending": ["worker-2.1"], "generation": 4, "epoch": 1, "loss": 0.5,
            "committed": 7, "records_per_s": 1000.0, "quarantined": [{"slot": 1, "why": "SIGSEGV"}],
            "set_aside": [{"record": 17, "why": "ValueError"}],
            "evaluation": {"step": 5, "loss": 0.25, "metrics": {"accuracy": 0.5}}, "best": None}  # fmt: skip
    facts = {"name": "digits-1", "state": "running", "why": "", "started": 10.0, "step": 6, "total": 40, "loss": 0.6,
             "checkpoint": 5, "folder": "runs/digits-1", "page": "http://127.0.0.1:1/", "live": live}  # fmt: skip
    said = format_status(facts, 100.0)
    for words in (
        "digits-1: running, began 1 min ago",
        "step 7 of 40, epoch 2, loss 0.5, 1000 records/s, 1 of 3 workers, generation 4, checkpoint of step 5",
        "page: http://127.0.0.1:1/",
        "last evaluation: step 5, loss 0.25, accuracy 0.5",
        "quarantined: worker 1: SIGSEGV",
        "set aside: record 17: ValueError",
        "worker-0.0  7      computing  0.2 s  512",
        "starting: worker-2.1",
    ):
        assert words in said
    assert "the master does not answer" in format_status({**facts, "live": None}, 100.0)
    assert "continue it with: trueline resume runs/digits-1" in format_status(
        {**facts, "state": "dead", "live": None}, 100.0
    )


def test_a_pace_tells_epoch_and_records_a_second_of_the_last_seconds() -> None:
    pace = StepPace()
    pace.extend("job.started", {"epochs": 4})
    seconds = [
        pace.extend("step.applied", {"step": n, "total": 8, "records": 50, "at_ns": n * 10**9}) for n in range(8)
    ]
    assert [found.get("epoch") for found in seconds][::2] == ["1/4", "2/4", "3/4", "4/4"]
    assert [found.get("records_per_s") for found in seconds] == [None, 50, 50, 50, 50, 50, 50, 50]
    assert pace.extend("worker.lost", {"worker": "w"}) == {"worker": "w"}


@pytest.mark.jobs
@pytest.mark.slow
def test_register_and_inspect_work_on_a_bundle_and_on_a_registered_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, new_registry: Callable[[Path], str]
) -> None:
    bundles.scaled(tmp_path / "b.bundle")
    store = ["--tracking-uri", new_registry(tmp_path)]
    assert app.run(["register", str(tmp_path / "b.bundle"), "--metric", "accuracy=0.9", *store]) == 0
    assert capsys.readouterr().out == "models:/double/1 (champion)\n"
    assert app.run(["bundle", "inspect", "models:/double@champion", "--json", *store]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["name"] == "double"
    assert app.run(["bundle", "inspect", str(tmp_path / "b.bundle")]) == 0
    assert "signature" in capsys.readouterr().out
    assert app.run(["bundle", "inspect", "models:/double@nobody", *store]) == 1
    assert "has: champion" in capsys.readouterr().err


def test_serve_passes_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = called(monkeypatch, "trueline.serve.api.serve", None)
    assert app.run(["serve", "b.bundle", "--port", "0", "--max-delay", "0.01", "-q"]) == 0
    assert (seen["args"], seen["port"], seen["max_delay_s"]) == (("b.bundle",), 0, 0.01)


def test_ship_passes_its_flags(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trained = SimpleNamespace(summary=SimpleNamespace(left_out=0))
    answer = SimpleNamespace(as_text=lambda: "shipped", as_dict=lambda: {"bundle": Path("b")}, trained=trained)
    seen = called(monkeypatch, "trueline.ship.ship", answer)
    assert app.run(["ship", "r.py", "--no-drill", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out) == {"bundle": "b"}
    assert (seen["drill"], seen["workers"], seen["alias"]) == (False, "3", "champion")


def test_ship_becomes_the_server_of_its_bundle(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = SimpleNamespace(summary=SimpleNamespace(left_out=0))
    answer = SimpleNamespace(as_text=lambda: "shipped", as_dict=dict, trained=trained, bundle=Path("runs/b.bundle"))
    called(monkeypatch, "trueline.ship.ship", answer)
    started = called(monkeypatch, "os.execv", None)
    assert app.run(["ship", "r.py", "--serve"]) == 0
    assert capsys.readouterr().out.startswith("shipped\n")
    assert started["args"] == (sys.executable, [sys.executable, "-m", "trueline", "serve", "runs/b.bundle"])
    assert app.run(["ship", "r.py", "--serve", "8081"]) == 0
    assert started["args"][1][-2:] == ["--port", "8081"]
    assert app.run(["ship", "r.py", "--serve", "--json"]) == 2


def test_faults_and_run_facts_are_read_from_the_command_line(tmp_path: Path) -> None:
    assert (parse_fault("7").step, parse_fault("7").slot) == (7, 0)
    (tmp_path / "job.json").write_text('{"epochs": 3, "faults": []}')
    (tmp_path / "summary.json").write_text('{"steps": 69, "seconds": 1.5}')
    facts = run_facts(tmp_path, {"note": "x"}, {"accuracy": "0.5"})
    assert facts.params == {"epochs": 3, "steps": 69, "note": "x"}
    assert facts.metrics == {"seconds": 1.5, "accuracy": 0.5}
    with pytest.raises(UsageError, match="a metric is a number"):
        run_facts(None, {}, {"accuracy": "good"})
    with pytest.raises(UsageError, match="holds no finished job"):
        run_facts(tmp_path / "absent", {}, {})


class Screen(io.StringIO):
    def __init__(self, *, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


def replay(stream: Screen) -> str:
    with progress(stream=stream):
        events.emit("job.started", total_steps=200, workers=3)
        for step in range(200):
            loss = 1.0 / (step + 1)
            events.emit("step.applied", step=step, total=200, loss=loss, workers=3, records_per_s=5120.0, at_ns=9)
            if step == 50:
                events.emit("worker.lost", worker="w1", why="killed by SIGKILL")
        events.emit("job.finished", steps=200)
    return stream.getvalue()


def test_without_a_terminal_there_is_a_line_for_each_tenth_of_the_way_and_for_what_happened() -> None:
    lines = replay(Screen(tty=False)).splitlines()
    steps = [line for line in lines if line.startswith("training")]
    assert 10 <= len(steps) <= 12
    assert steps[-1] == "training 200/200 loss=0.005 workers=3 records_per_s=5120"
    assert 'worker.lost worker=w1 why="killed by SIGKILL"' in lines


def test_on_a_terminal_there_is_a_bar_and_events_scroll_by_above_it() -> None:
    text = replay(Screen(tty=True))
    assert "training" in text
    assert "worker.lost" in text
    assert "200/200" in text


def test_a_bar_takes_the_terminal_only_when_something_is_counted() -> None:
    stream = Screen(tty=True)
    with progress(stream=stream):
        events.emit("bundle.sealed", path="x.bundle")
    assert "\x1b[?25l" not in stream.getvalue()  # hides the cursor
    assert "\x1b[?25l" in replay(Screen(tty=True))


def test_counts_without_an_end_or_without_numbers_do_no_harm() -> None:
    assert read_count("step.applied", {"step": 5}) == ("training", 6, None)
    assert read_count("step.applied", {}) is None
    assert read_count("worker.lost", {"step": 5}) is None
    assert detail({"loss": 0.25, "workers": 3, "other": 1}) == "loss=0.25 workers=3"
    sparse = Sparse()
    assert [done for done in range(1, 301) if sparse.due("step.applied", done, None)] == [1, 100, 200, 300]


def test_importing_trueline_loads_little_and_each_verb_is_callable() -> None:
    code = (
        "import sys; before = len(sys.modules); import trueline; loaded = len(sys.modules) - before;"
        "assert 'torch' not in sys.modules and 'click' not in sys.modules; assert loaded < 50, loaded;"
        "assert set(trueline.__all__) <= set(dir(trueline));"
        "assert all(callable(getattr(trueline, name)) for name in ('train', 'capture', 'serve', 'register'));"
        "assert trueline.train is sys.modules['trueline.train']; import trueline.serve.settings;"
        "assert trueline.serve.settings and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_room_that_is_a_verb_calls_the_function_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import trueline
    import trueline.serve.api as room

    monkeypatch.setattr(room, "serve", lambda source, **flags: (source, flags))
    assert trueline.serve("b.bundle", port=1) == ("b.bundle", {"port": 1})
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = trueline.trian  # type: ignore[attr-defined]


def test_a_reader_of_the_progress_that_goes_away_does_not_end_the_work() -> None:
    from trueline.cli._progress import progress

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with progress(stream=Gone()):
        events.emit("step.applied", step=0, total=1, loss=0.5)


def test_a_job_whose_settings_are_torn_is_listed_as_damaged_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torn-1").mkdir()
    (tmp_path / "torn-1" / "job.json").write_text('{"name": ')
    assert app.run(["jobs", "--runs", str(tmp_path)]) == 0
    assert "torn-1  damaged" in capsys.readouterr().out
    assert app.run(["status", str(tmp_path / "torn-1")]) == 2
    assert "name one of them" in capsys.readouterr().err
