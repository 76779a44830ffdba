"""Whether an exported program is right as ONNX too: translated, run by ONNX Runtime, compared on every call."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import torch

from trueline.capture.onnx import emit
from trueline.doctor import divisible_sizes
from trueline.doctor.examine import Finding, Oracle, silence_exporters
from trueline.doctor.recorded_calls import RecordedAnswer, RecordedCall, agree
from trueline.errors import CaptureError


def right_as_onnx(finding: Finding, oracle: Oracle) -> str:
    """`proven`, or why the program has no ONNX form that is right. Raises nothing."""
    assert finding.program is not None
    if not oracle.forgetful and finding.memory is None:
        return "ONNX cannot hold the state"
    try:
        with torch.no_grad(), silence_exporters():
            session = _open_session(emit.translated(finding.program, *_names(finding.program)))
    except CaptureError as error:
        return f"not translated: {error.message[:200]}"
    except Exception as error:  # noqa: BLE001 (blind except): a refusal of the exporter or the runtime is the answer
        return f"not translated: {_first(error.__cause__ or error)}"
    names = [spec.name for spec in session.get_inputs()]

    def run(*tensors: Any) -> Any:
        return session.run(None, {name: np.asarray(one) for name, one in zip(names, tensors, strict=False)})

    ask = run if finding.memory is None else finding.memory.thread_state(run)
    for call, expected in zip(oracle.calls, oracle.answers, strict=True):
        if expected.arrays is None or not divisible_sizes.within(call, finding.steps):
            continue
        reason, _ = agree(expected, _answer_of(ask, call))
        if reason:
            return f"refused: {reason}"
    return "proven"


def _names(program: torch.export.ExportedProgram) -> tuple[list[str], list[str]]:
    signature = program.graph_signature
    return [f"input {i}" for i in range(len(signature.user_inputs))], [
        f"output {i}" for i in range(len(signature.user_outputs))
    ]


def _open_session(made: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with contextlib.redirect_stderr(io.StringIO()):
        return onnxruntime.InferenceSession(made.model_proto.SerializeToString(), options)


def _answer_of(ask: Callable[..., Any], call: RecordedCall) -> RecordedAnswer:
    try:
        found = ask(*call.tensors)
    except Exception as error:  # noqa: BLE001 (blind except): whatever the runtime raises is a disagreement
        return RecordedAnswer(arrays=None, error=_first(error))
    return RecordedAnswer(arrays={f"output {index}": array for index, array in enumerate(found)}, error="")


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
