"""Options come from the command line, else the environment, else trueline.toml, else their defaults."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import reference
from trueline.cli import app


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory two levels below a trueline.toml that each test writes."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return tmp_path


@pytest.fixture
def seen(monkeypatch):
    """The options with which `trueline serve` was called."""
    found = {}
    monkeypatch.setattr("trueline.serve.api.serve", lambda source, **given: found.update(given, source=source))
    return found


def test_a_flag_wins_over_the_environment_that_over_the_file_and_that_over_the_default(folder, seen, monkeypatch):
    (folder / "trueline.toml").write_text("[serve]\nport = 9000\nmax-batch = 8\nhost = '127.0.0.2'\n")
    monkeypatch.setenv("TRUELINE_SERVE_PORT", "9001")
    monkeypatch.setenv("TRUELINE_SERVE_MAX_BATCH", "9")
    assert app.run(["serve", "b", "--port", "9002", "-q"]) == 0
    assert (seen["port"], seen["max_batch"], seen["host"], seen["threads"]) == (9002, 9, "127.0.0.2", 0)


def test_the_nearest_file_upwards_counts_alone(folder, seen):
    (folder / "trueline.toml").write_text("[serve]\nport = 9000\n")
    (folder / "a" / "trueline.toml").write_text("[serve]\nthreads = 2\n")
    assert app.run(["serve", "b", "-q"]) == 0
    assert (seen["port"], seen["threads"]) == (8080, 2)


def test_flags_and_lists_are_true_and_lists_in_the_file(folder, seen):
    (folder / "trueline.toml").write_text("[serve]\nwatch = true\nload = 'all'\nmodel_store = 'b'\n")
    assert app.run(["serve", "-q"]) == 0
    assert (seen["watch"], seen["load"], seen["management_port"]) == (True, "all", 8081)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\nprot = 1\n", "[serve] has no option 'prot'\nhint: did you mean 'port'?"),
        ("[serv]\nport = 1\n", "'serv' is no command\nhint: did you mean 'serve'?"),
        ("[bundle.verfy]\nseed = 1\n", "'bundle.verfy' is no command\nhint: did you mean 'bundle.verify'?"),
        ("serve = 3\n", "'serve' is no table\nhint: write [serve]"),
        ("[serve\n", "cannot be read: "),
    ],
)
def test_what_the_file_says_wrongly_is_named_with_the_nearest_word(folder, seen, capsys, text, said):
    (folder / "trueline.toml").write_text(text)
    assert app.run(["serve", "b"]) == 2
    err = capsys.readouterr().err
    assert f"{folder / 'trueline.toml'}: {said}" in err or said in err
    assert not seen


def test_a_value_of_the_wrong_kind_is_refused_with_the_option(folder, seen, capsys):
    (folder / "trueline.toml").write_text("[serve]\nport = 'eighty'\n")
    assert app.run(["serve", "b"]) == 2
    assert "'eighty' is not a valid integer" in capsys.readouterr().err


def test_verbs_of_a_group_have_tables_and_variables_of_their_own(folder, monkeypatch):
    found = {}
    monkeypatch.setattr("trueline.capture.verify.verify", lambda path, **given: found.update(given) or 1 / 0)
    (folder / "trueline.toml").write_text("[bundle.verify]\nseed = 7\n")
    monkeypatch.setenv("TRUELINE_BUNDLE_VERIFY_FORMAT", "onnx")
    app.run(["bundle", "verify", "b"])
    assert (found["seed"], found["format"]) == (7, "onnx")


def test_no_two_options_share_a_variable_and_each_has_one():
    names = []
    for path in app.known_tables():
        command = reference.command_of(path)
        app.name_variables(command, path)
        names += [str(option.envvar) for option in app.flags_of(command).values()]
    assert len(names) == len(set(names))
    assert all(name.startswith("TRUELINE_") for name in names)


@pytest.mark.parametrize("path", app.known_tables(), ids=" ".join)
def test_every_verb_has_json(path):
    flags = [flag for param in reference.command_of(path).params for flag in param.opts]
    assert "--json" in flags


def test_the_shell_completes_verbs_and_options():
    def completed(*words: str) -> str:
        env = {**os.environ, "_TRUELINE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words)}
        env["COMP_CWORD"] = str(len(words) - 1)
        command = [sys.executable, "-c", "from trueline.cli.app import run; run([])"]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout

    assert "plain,train" in completed("trueline", "tr")
    assert "plain,verify" in completed("trueline", "bundle", "ver")
    assert "plain,--max-batch" in completed("trueline", "serve", "--max-b")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_line_of_the_guide_completes_verbs_in_bash():
    (install,) = re.findall(r"    echo '(.*)' >> ~/.bashrc", reference.HEAD)
    words = 'COMP_WORDS=(trueline bundle ""); COMP_CWORD=2; _trueline_completion trueline; echo "${COMPREPLY[@]}"'
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "--norc", "-c", f"{install}; {words}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["inspect", "report", "verify", "sign", "delta", "export-cpp"]


def test_the_page_of_the_configuration_is_what_the_commands_say():
    page = Path(__file__).parents[2] / "docs" / "guides" / "configuration.md"
    assert page.read_text() == reference.page(), "run `make docs`"


def test_an_option_says_what_it_does():
    for path in app.known_tables():
        for param in reference.command_of(path).params:
            assert not isinstance(param, click.Option) or param.help, (path, param.name)
