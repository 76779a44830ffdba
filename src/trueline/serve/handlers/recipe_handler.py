"""A recipe's `preprocess` and `postprocess` around the proven program of its bundle. Runs in the handler's process.

A worker is ready when the program has reproduced the golden records. `preprocess` gets one request: the value of its
JSON, the text, or the bytes; a dictionary by name if it has several parts. It returns a batch of inputs: an array or
tensor, several in the model's order, or a dictionary by name. `postprocess` gets the outputs of that batch: an array,
or a dictionary by name. An exception fails its own request, not the others of the batch.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trueline.bundle.read import open_bundle
from trueline.bundle.signature import Check, Signature
from trueline.errors import RequestError, TruelineError, UsageError, join_names
from trueline.recipe.contract import ONLY_CALLED
from trueline.recipe.load import load_recipe
from trueline.serve import json_records
from trueline.serve.handlers.worker import SHARED_WEIGHTS
from trueline.serve.models.loader import RuntimeOptions, load, without_paths

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

BUNDLE = "model.bundle"
RECIPE = "recipe.py"
MAX_BATCH = 1024


class RecipeHandler:
    """A handler by TorchServe's contract: `initialize`, then `handle` for each batch."""

    def initialize(self, context: Any) -> None:
        """Raises BundleError, NotProven, RecipeError."""
        self._folder = Path(context.system_properties["model_dir"])
        self._recipe = load_recipe(self._folder / RECIPE, needs=ONLY_CALLED)
        self._bundle = open_bundle(self._folder / BUNDLE)
        shared = os.environ.get(SHARED_WEIGHTS)
        way = RuntimeOptions(
            threads=int(os.environ.get("OMP_NUM_THREADS", "1")), shared=None if shared is None else Path(shared)
        )
        loaded = load(self._bundle, way, max_batch=MAX_BATCH)
        self._session, self._signature = loaded.session, loaded.session.signature
        self._check = Check(self._signature)
        self._together = loaded.plan.max_batch if loaded.plan.batch else 0
        self._explainer: Any = None

    def handle(self, data: Sequence[Mapping[str, Any]], context: Any) -> list[Any]:
        """One answer for each request; sets the status of those that failed."""
        answers: list[Any] = [None] * len(data)
        given: dict[int, json_records.JsonRecords] = {}
        began = time.perf_counter()
        for index, row in enumerate(data):
            try:
                given[index] = self._preprocess(row)
            except Exception as error:  # noqa: BLE001 - user code: it fails this request
                answers[index] = _reject(context, index, error, "preprocess")
        context.metrics.add_time("PreprocessTime", (time.perf_counter() - began) * 1e3)
        if given and context.get_request_header(0, "explain") == "True":
            return [self._explain(data[index], given[index], context, index) for index in given]
        began = time.perf_counter()
        outputs: dict[int, Any] = {}
        for group in self._groups({index: one.inputs for index, one in given.items()}):
            outputs |= self._run({index: given[index].inputs for index in group})
        context.metrics.add_time("InferenceTime", (time.perf_counter() - began) * 1e3)
        for index, found in outputs.items():
            try:
                if isinstance(found, Exception):
                    raise found
                answers[index] = self._postprocess(found, single=given[index].single)
            except Exception as error:  # noqa: BLE001 - as above
                answers[index] = _reject(context, index, error, "postprocess")
        return answers

    def _preprocess(self, row: Mapping[str, Any]) -> json_records.JsonRecords:
        value = _value(row)
        if self._recipe.preprocess is not None:
            inputs = inputs_by_name(self._recipe.preprocess(value), self._signature)
            self._check(inputs)
            return json_records.JsonRecords(inputs, False)
        text = value if isinstance(value, bytes | bytearray) else msgspec.json.encode(value)
        found = json_records.decode(text, self._signature)
        self._check(found.inputs)
        return found

    def _groups(self, given: Mapping[int, Mapping[str, Array]]) -> list[list[int]]:
        """Requests that may share a run: of one shape but for the rows, and within the program's largest batch."""
        if not self._together:
            return [[index] for index in given]
        groups: list[list[int]] = []
        last: dict[object, tuple[list[int], int]] = {}
        for index, inputs in given.items():
            key = tuple((name, array.shape[1:]) for name, array in inputs.items())
            rows = len(next(iter(inputs.values())))
            group, size = last.get(key, ([], 0))
            if not group or size + rows > self._together:
                group, size = [], 0
                groups.append(group)
            group.append(index)
            last[key] = group, size + rows
        return groups

    def _run(self, group: Mapping[int, Mapping[str, Array]]) -> dict[int, Any]:
        """Outputs or exception of each request; the requests of a group that fails run one by one."""
        if len(group) == 1:
            ((index, inputs),) = group.items()
            try:
                return {index: self._session.run(inputs)}
            except Exception as error:  # noqa: BLE001 - any error of a runtime fails this request
                return {index: error}
        names = [spec.name for spec in self._signature.inputs]
        try:
            outputs = self._session.run({name: np.concatenate([one[name] for one in group.values()]) for name in names})
        except Exception:  # noqa: BLE001 - each request alone shows which of them fails
            return {index: one for i, inputs in group.items() for index, one in self._run({i: inputs}).items()}
        found: dict[int, Any] = {}
        at = 0
        for index, inputs in group.items():
            rows = len(inputs[names[0]])
            found[index] = {name: array[at : at + rows] for name, array in outputs.items()}
            at += rows
        return found

    def _postprocess(self, outputs: Mapping[str, Array], *, single: bool) -> Any:
        if self._recipe.postprocess is None:
            return json_records.encode(outputs, single=single)
        return _plain(self._recipe.postprocess(next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)))

    def _explain(self, row: Mapping[str, Any], given: json_records.JsonRecords, context: Any, index: int) -> Any:
        try:
            if self._explainer is None:
                from trueline.runtime.attribution import Explainer

                self._explainer = Explainer(
                    self._bundle.program_path("torch_export"), self._bundle.signature_of("torch_export")
                )
            target = row.get("target") or context.get_request_header(index, "target")
            found = self._explainer.explain(given.inputs, _target(target))
        except Exception as error:  # noqa: BLE001 - Captum over the user's model
            return _reject(context, index, error, "explanation")
        return {
            "output": found.output,
            "target": found.target,
            "attributions": {name: array.tolist() for name, array in found.attributions.items()},
            "convergence_delta": found.convergence_delta,
        }


def inputs_by_name(found: Any, signature: Signature) -> dict[str, Array]:
    """The result of `preprocess` as arrays by name, in the signature's order. Raises ValueError."""
    names = [spec.name for spec in signature.inputs]
    if isinstance(found, Mapping):
        if found.keys() != set(names):
            raise ValueError(
                f"preprocess returned the inputs {join_names(map(str, found))}; the model takes {join_names(names)}"
            )
        values = [found[name] for name in names]
    else:
        values = list(found) if isinstance(found, list | tuple) and len(names) > 1 else [found]
        if len(values) != len(names):
            raise ValueError(f"preprocess returned {len(values)} inputs; the model takes {join_names(names)}")
    specs = zip(signature.inputs, values, strict=True)
    return {spec.name: _array(value, spec.dtype) for spec, value in specs}


def _array(value: Any, dtype: np.dtype[np.generic]) -> Array:
    """Lists become `dtype`; the signature checks the dtype of arrays and tensors."""
    if isinstance(value, list | tuple | int | float):
        return np.asarray(value, dtype)
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.ascontiguousarray(value)


def _value(row: Mapping[str, Any]) -> Any:
    """The value of a single part, or several by name."""
    parts = {name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.items()}
    parts = {name: value for name, value in parts.items() if name != "target"} or parts
    return next(iter(parts.values())) if len(parts) == 1 else parts


def _target(value: Any) -> int | None:
    """The class index that a client names. Raises RequestError."""
    if isinstance(value, bytes | bytearray):
        value = value.decode("ascii", "replace")
    if value is None or value == "":
        return None
    if not str(value).isdecimal() or len(str(value)) > 9:
        raise RequestError(f"target {str(value)[:32]!r} is no index of a class")
    return int(str(value))


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy or torch as JSON values."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _reject(context: Any, index: int, error: Exception, stage: str) -> dict[str, Any]:
    """The body of a failed request: the client's fault in the message, the server's in the log."""
    if isinstance(error, RequestError | ValueError) and stage != "postprocess":
        code, kind, message = 400, "BadRequestException", without_paths(getattr(error, "message", "") or str(error))
    elif isinstance(error, UsageError):
        code, kind, message = 501, "NotImplementedException", error.message
    else:
        traceback.print_exception(error)
        code, kind = 500, "InternalServerException"
        message = without_paths(error.message) if isinstance(error, TruelineError) else f"{stage} failed"
    context.set_response_status(code, kind, index)
    context.set_response_content_type(index, "application/json")
    return {"code": code, "type": kind, "message": message}
