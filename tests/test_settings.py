"""A setting is declared once, and what is made of the declaration agrees."""

from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from trueline.cli.options import setting_options
from trueline.errors import UsageError
from trueline.recipe.settings import TrainingSettings
from trueline.serve.settings import ServeOptions, ServeSettings
from trueline.settings import check, declared_settings, setting
from trueline.train.settings import Overrides


@dataclass(frozen=True)
class Few:
    inner: int = 3
    port: int = setting(80, "Where.", low=0, high=65535)
    wait_s: float | None = setting(None, "How long.", flag="wait", metavar="SECONDS", low=0)
    memory_bytes: int = setting(2 * 2**20, "How much.", flag="memory", metavar="MIB", unit=2**20)
    mode: str = setting("fast", "How.", choices=("fast", "slow"))
    loud: bool = setting(False, "With noise.")
    share: float = setting(0.5, "Of what.", low=0, below=1)


def given(*arguments):
    """What a command with the settings as its options gets."""
    found = {}

    @click.command()
    @setting_options(Few)
    def command(**options):
        found.update(options)

    result = CliRunner().invoke(command, arguments)
    return (found, "") if result.exit_code == 0 else ({}, result.output)


def test_each_setting_is_an_option_with_its_default_and_its_unit():
    assert given()[0] == {"port": 80, "wait_s": None, "memory_bytes": 2 * 2**20, "mode": "fast", "loud": False,
                        "share": 0.5}  # fmt: skip
    found, _ = given("--port", "0", "--wait", "1.5", "--memory", "3", "--mode", "slow", "--loud")
    assert found == {"port": 0, "wait_s": 1.5, "memory_bytes": 3 * 2**20, "mode": "slow", "loud": True, "share": 0.5}


@pytest.mark.parametrize(
    "arguments", [("--port", "-1"), ("--wait", "-0.1"), ("--mode", "odd"), ("--inner", "3"), ("--share", "1")]
)
def test_an_option_out_of_range_is_refused(arguments):
    assert given(*arguments)[1]


@pytest.mark.parametrize(
    ("few", "said"),
    [
        (Few(port=65536), "port is 65536, expected at least 0 and at most 65535"),
        (Few(wait_s=-1.0), r"wait_s is -1\.0, expected at least 0"),
        (Few(wait_s=float("nan")), "wait_s is nan, expected a finite number"),
        (Few(mode="odd"), "mode is 'odd', expected one of fast, slow"),
        (Few(mode=None), "mode is None, expected one of fast, slow"),
        (Few(share=None), "share is None, expected a value of type float"),
        (Few(share=1.0), r"share is 1\.0, expected at least 0 and below 1"),
    ],
)
def test_a_value_out_of_range_is_refused_in_a_call_too_with_the_range(few, said):
    with pytest.raises(UsageError, match=said) as raised:
        check(few)
    assert raised.value.hint


def test_values_in_range_pass():
    check(Few(port=65535, wait_s=0.0, mode="slow", memory_bytes=1))


def test_the_arguments_of_serve_are_the_settings_that_are_declared():
    assert set(ServeOptions.__annotations__) | {"port"} == {one.name for one in declared_settings(ServeSettings)}


def test_a_servers_settings_out_of_range_name_the_value_and_the_range():
    with pytest.raises(UsageError, match="max_batch is 0") as raised:
        ServeSettings(max_batch=0)
    assert "at least 1" in raised.value.message


def test_the_arguments_of_train_are_the_settings_that_are_declared():
    assert set(Overrides.__annotations__) == {one.name for one in declared_settings(TrainingSettings)}
