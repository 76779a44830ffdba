"""Doctests of docstrings become code blocks of the API reference, an extension of griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class Fences(griffe.Extension):
    """Puts each doctest between fences."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = _DOCTEST.sub(lambda code: f"```pycon\n{code.group()}\n```", obj.docstring.value)
