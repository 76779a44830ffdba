"""Memory of a program: what a process of its own grows by when it opens and runs it. Imports no torch.

`python -m trueline.compress.measure.memory` reads requests from stdin, forks for each before any program is open, and
prints the growth of the child's peak in bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

Shapes = Mapping[str, Sequence[int]]
"""By input."""

_STATUS = Path("/proc/self/status")
TIMEOUT_S = 600.0


def measure_memory(
    programs: Mapping[str, Path], inputs: Path, in_openvino: Mapping[str, Shapes] = MappingProxyType({})
) -> dict[str, int]:
    """Bytes by program; those that cannot be measured are left out. `inputs`: a batch by input name, as safetensors;
    `in_openvino`: programs that OpenVINO runs instead of ONNX Runtime, and the shapes for which it has them once more,
    if any."""
    request = {
        "programs": {name: str(path) for name, path in programs.items()}, "inputs": str(inputs),
        "in_openvino": in_openvino,
    }  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trueline.compress.measure.memory"], input=json.dumps(request).encode(),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, num_bytes = json.loads(line)
        found[name] = num_bytes
    return found


def _peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _resident() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def _run_in_openvino(path: str, arrays: Mapping[str, Any], shapes: Shapes) -> int:
    import numpy as np
    import openvino

    before, core = _resident(), openvino.Core()
    forms, config = [(core.read_model(path), dict(arrays))], {"INFERENCE_PRECISION_HINT": "f32"}
    if shapes:
        fixed = core.read_model(path)
        fixed.reshape({name: list(shape) for name, shape in shapes.items()})
        forms.append((fixed, {name: np.resize(arrays[name], shape) for name, shape in shapes.items()}))
    requests = [(core.compile_model(model, "CPU", config).create_infer_request(), feeds) for model, feeds in forms]
    del forms
    for request, feeds in requests * 2:
        request.infer(feeds)
    return _peak() - before


def _run_alone(path: str, arrays: Mapping[str, Any]) -> int:
    import onnxruntime

    before = _resident()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for _ in range(2):
        session.run(None, dict(arrays))
    return _peak() - before


def main(requests: Sequence[bytes]) -> None:
    import onnxruntime  # noqa: F401 - imported before the forks, so that no child pays for it
    from safetensors.numpy import load_file

    request = json.loads(b"".join(requests))
    arrays = load_file(request["inputs"])
    if request["in_openvino"]:
        import openvino  # noqa: F401 - for the same reason
    for name, path in request["programs"].items():
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                shapes = request["in_openvino"].get(name)
                taken = _run_alone(path, arrays) if shapes is None else _run_in_openvino(path, arrays, shapes)
                os.write(1, (json.dumps([name, taken]) + "\n").encode())
                code = 0
            finally:
                os._exit(code)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.stdin.buffer.readlines())
