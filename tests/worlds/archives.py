"""Small archives of models and workflows for tests: plain Python handlers, no torch."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from textwrap import dedent
from typing import Any

DOUBLE = """
    def handle(data, context):
        if data is None:
            return None
        return [{"doubled": 2 * row["body"]["x"]} for row in data]
"""


def manifest(**model: Any) -> bytes:
    told = {"modelName": "noop", "handler": "noop.py", "modelVersion": "1.0"} | model
    return json.dumps({"createdOn": "01/01/2026 00:00:00", "runtime": "python", "model": told}).encode()


def files(
    code: str = DOUBLE, *, config: str = "", extra: dict[str, bytes] | None = None, **model: Any
) -> dict[str, bytes]:
    """The files of an archive, by name."""
    told = model | ({"configFile": "model-config.yaml"} if config else {})
    found = {"MAR-INF/MANIFEST.json": manifest(**told), "noop.py": dedent(code).encode()}
    if config:
        found["model-config.yaml"] = dedent(config).encode()
    return found | (extra or {})


def mar(path: Path, code: str = DOUBLE, **options: Any) -> Path:
    """A `.mar` at `path`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files(code, **options).items():
            archive.writestr(name, content)
    return path


def war_files(code: str, spec: str, *, name: str = "flow", manifest: str = "WAR-INF/MANIFEST.json") -> dict[str, bytes]:
    """The files of a workflow's archive, by name."""
    told = {"workflowName": name, "specFile": "spec.yaml", "handler": "functions.py"}
    return {
        manifest: json.dumps({"createdOn": "01/01/2026 00:00:00", "archiverVersion": "1", "workflow": told}).encode(),
        "functions.py": dedent(code).encode(),
        "spec.yaml": dedent(spec).encode(),
    }


def war(path: Path, code: str, spec: str, **options: Any) -> Path:
    """A `.war` at `path`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in war_files(code, spec, **options).items():
            archive.writestr(name, content)
    return path
