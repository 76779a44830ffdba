"""One declaration of a setting (name, type, default, range, help), from which all its interfaces are made.

    class Settings:
        port: int = setting(8080, "Port to listen on; 0 takes a free one.", low=0, high=65535)

A dataclass of such fields becomes the options of a command (`trueline.cli.options.setting_options`), the arguments of a
function, the table of the configuration page, and `check` refuses values out of range wherever they come from.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
    below: float | None = None
    """As `high`, and not allowed itself."""
    choices: tuple[str, ...] = ()
    """Those of a field whose type is a Literal are its values."""
    unit: int = 1
    """How much of the field's unit one of the option's is: 2**20 for an option in MiB and a field in bytes."""
    section: str = ""
    """Heading of the option in the command's help."""
    recipe: bool = False
    """Whether a recipe may set it at its top level."""
    fixed: bool = False
    """Whether a resumed job has to keep it."""

    @property
    def bounds(self) -> str:
        """`at least 0 and below 1`; empty without bounds."""
        bounds = (("at least", self.low), ("at most", self.high), ("below", self.below))
        return " and ".join(f"{word} {value}" for word, value in bounds if value is not None)

    def allows(self, value: Any) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )


@dataclass(frozen=True, slots=True)
class DeclaredSetting:
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
def declared_settings(settings: Any) -> tuple[DeclaredSetting, ...]:
    """The settings that the dataclass `settings` declares, in order; fields without a Setting are internal."""
    hints = get_type_hints(settings)
    return tuple(
        _declare(one.name, hints[one.name], one.default, one.metadata[_KEY])
        for one in fields(settings)
        if _KEY in one.metadata
    )


def _declare(name: str, hint: Any, default: Any, setting: Setting) -> DeclaredSetting:
    if get_origin(hint) is Literal:
        return DeclaredSetting(name, str, default, replace(setting, choices=get_args(hint)))
    plain = [one for one in get_args(hint) if one is not NoneType]
    return DeclaredSetting(name, plain[0] if plain else hint, default, setting)


def check(settings: Any, *, unchecked: Collection[str] = ()) -> None:
    """Raises UsageError for a value of `settings` that is out of its range, with the value and the range."""
    for one in declared_settings(settings.__class__):
        value = getattr(settings, one.name)
        if value == one.default or one.name in unchecked:
            continue
        if one.setting.choices and value not in one.setting.choices:
            expected = f"one of {join_names(one.setting.choices)}"
        elif value is None:
            expected = f"a value of type {one.kind.__name__}"
        elif isinstance(value, float) and not math.isfinite(value):
            expected = "a finite number"
        elif not one.setting.allows(value):
            expected = one.setting.bounds
        else:
            continue
        raise UsageError(f"{one.name} is {value!r}, expected {expected}", hint=one.setting.help)
