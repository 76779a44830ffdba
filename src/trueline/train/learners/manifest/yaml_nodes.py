"""Strict reading of YAML: each error names file, line, column and field. Pure.

Values are read from the nodes of the document, not from what YAML makes of them: so `version: 1.10` keeps its zero, and
a field knows where it stands.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

import yaml

from trueline.errors import UsageError, closest, join_names

_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_STRING, _NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value of the file. `field`: its path, as `framework.command`; empty: the whole document."""

    file: str
    field: str
    node: yaml.Node

    def fail(self, message: str, hint: str = "") -> NoReturn:
        """Raises UsageError with the place of this value."""
        mark = self.node.start_mark
        field = f"{self.field}: " if self.field else ""
        raise UsageError(f"{self.file}:{mark.line + 1}:{mark.column + 1}: {field}{message}", hint=hint)

    def fields(self, known: Collection[str], *, also: Collection[str] = ()) -> dict[str, "YamlNode"]:
        """The fields of a mapping that have a value, by name; `also`: names that are known and not suggested."""
        found = {}
        for name, pair in self._pairs().items():
            inner = YamlNode(self.file, f"{self.field}.{name}" if self.field else name, pair.node)
            if name not in known and name not in also:
                near = closest(name.lower(), known)
                where = f"{self.field} has" if self.field else "there is"
                YamlNode(self.file, "", pair.key).fail(
                    f"{where} no field '{name}' (known: {join_names(known)})",
                    hint=f"did you mean '{near}'?" if near else "",
                )
            if not inner.is_null:
                found[name] = inner
        return found

    def entries(self) -> dict[str, "YamlNode"]:
        """The fields of a mapping whose names the user chooses."""
        return {name: YamlNode(self.file, f"{self.field}.{name}", pair.node) for name, pair in self._pairs().items()}

    def _pairs(self) -> Mapping[str, "_Pair"]:
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"expected fields, got {self.describe()}")
        pairs: dict[str, _Pair] = {}
        for key, value in self.node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                YamlNode(self.file, self.field, key).fail("expected the name of a field")
            if key.value in pairs:
                YamlNode(self.file, self.field, key).fail(f"field '{key.value}' stands here twice")
            pairs[key.value] = _Pair(key, value)
        return dict(pairs)

    def items(self) -> list["YamlNode"]:
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"expected a list, got {self.describe()}")
        return [YamlNode(self.file, f"{self.field}[{at}]", node) for at, node in enumerate(self.node.value)]

    def text(self, *, choices: Collection[str] = ()) -> str:
        """The characters of a scalar as they stand; with `choices`, one of them."""
        if not isinstance(self.node, yaml.ScalarNode):
            self.fail(f"expected one value, got {self.describe()}")
        value = str(self.node.value)
        if choices and value not in choices:
            near = closest(value.lower(), choices)
            self.fail(f"'{value}' is not one of {join_names(choices)}", f"did you mean '{near}'?" if near else "")
        return value

    def number(self) -> float:
        """A number of at least zero; a quoted one is text."""
        value = self.text()
        if not _FLOAT.fullmatch(value) or self.node.tag == _STRING or float(value) < 0:
            self.fail(f"expected a number of at least 0, got {self.describe()}")
        return float(value)

    def whole(self, low: int) -> int:
        value = self.text()
        if not re.fullmatch(r"\d+", value) or self.node.tag == _STRING or int(value) < low:
            self.fail(f"expected a whole number of at least {low}, got {self.describe()}")
        return int(value)

    @property
    def is_null(self) -> bool:
        return bool(self.node.tag == _NULL)

    def describe(self) -> str:
        match self.node:
            case yaml.MappingNode():
                return "fields"
            case yaml.SequenceNode():
                return "a list"
            case _:
                return "nothing" if self.is_null else f"'{self.node.value}'"


@dataclass(frozen=True, slots=True)
class _Pair:
    key: yaml.Node
    node: yaml.Node


def parse_yaml(text: str, file: str) -> YamlNode:
    """The one document of `text`. Raises UsageError with line and column where it is no YAML."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise UsageError(f"{where}: this is no YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{file}: this is no YAML: {error}") from error
    finally:
        loader.dispose()
    if node is None:
        raise UsageError(f"{file}:1:1: the file is empty, expected a manifest")
    return YamlNode(file, "", node)
