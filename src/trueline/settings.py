"""One declaration of a setting: its name, type, default, range and help, from which interfaces are made.

    class Settings:
        port: int = setting(8080, "Port to listen on; 0 takes a free one.", low=0, high=65535)

A dataclass of such fields becomes the options of a command (`trueline.cli.options.setting_options`), the arguments of a
function, the table of the configuration page, and `check` refuses values out of range wherever they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from trueline.errors import UsageError, join_names

_KEY = "setting"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a field's type does not say."""

    help: str
    metavar: str = ""
    flag: str = ""
    """The option without dashes, where it is not the field's name."""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    unit: int = 1
    """How much of the field's unit one of the option's is: 2**20 for an option in MiB and a field in bytes."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting with what its dataclass says of it."""

    name: str
    kind: type
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        return self.setting.flag or self.name.replace("_", "-")


def setting(default: Any, help: str, **rest: Any) -> Any:
    """A dataclass field with its Setting, of which `rest` are fields."""
    return field(default=default, metadata={_KEY: Setting(help, **rest)})


@cache
def declared(settings: Any) -> tuple[Declared, ...]:
    """The settings that the dataclass `settings` declares, in order; fields without a Setting are internal."""
    hints = get_type_hints(settings)
    return tuple(
        Declared(one.name, _kind(hints[one.name]), one.default, one.metadata[_KEY])
        for one in fields(settings)
        if _KEY in one.metadata
    )


def _kind(hint: Any) -> type:
    plain = [one for one in get_args(hint) if one is not NoneType]
    kind: type = plain[0] if plain else hint
    return kind


def check(settings: Any) -> None:
    """Raises UsageError for a value of `settings` that is out of its range, with the value and the range."""
    for one in declared(settings.__class__):
        value, low, high = getattr(settings, one.name), one.setting.low, one.setting.high
        if value is None or value == one.default:
            continue
        if one.setting.choices and value not in one.setting.choices:
            raise UsageError(f"{one.name} is '{value}'", hint=f"choose one of {join_names(one.setting.choices)}")
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low:g}" if high is None else f"between {low or 0:g} and {high:g}"
            raise UsageError(f"{one.name} is {value}", hint=f"choose a number of {bounds}")
