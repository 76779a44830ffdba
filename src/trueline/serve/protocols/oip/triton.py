"""Metadata of versions, and Triton's statistics, configuration and index. Pure.

Source: Triton's pages extension_statistics, extension_model_configuration, extension_model_repository.
"""

from collections.abc import Iterable
from typing import Any

from trueline.bundle.signature import TensorSpec
from trueline.serve.batching.policy import PRIORITIES, USUAL
from trueline.serve.models.catalog import Models
from trueline.serve.models.servable import Servable
from trueline.serve.tensors import codec

EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)
_STATES = {"loading": "LOADING", "ready": "READY", "failed": "UNAVAILABLE", "retiring": "UNLOADING"}


def describe(servable: Servable, versions: list[str]) -> dict[str, Any]:
    """Model metadata; `parameters` has what was measured and chosen when the version was loaded."""
    named = {"name": servable.model, "versions": versions}
    if servable.handler is not None:
        parameters = servable.handler.parameters
        return {**named, "platform": "torchserve_archive", "inputs": [], "outputs": [], "parameters": parameters}
    loaded = servable.program.loaded
    plan, signature = loaded.plan, loaded.session.signature
    return {
        **named,
        "platform": loaded.platform,
        "inputs": [codec.tensor_metadata(spec) for spec in signature.inputs],
        "outputs": [codec.tensor_metadata(spec) for spec in signature.outputs],
        "parameters": {
            "digest": loaded.digest,
            "golden_cases": loaded.golden_cases,
            "batching": plan.batch,
            "batching_reason": plan.why,
            "max_batch": plan.max_batch,
            "inline_values": plan.inline_values,
            "run_us": {str(rows): round(seconds * 1e6, 1) for rows, seconds in plan.latency_s.items()},
        },
    }


def statistics(models: Models, model: str | None, version: str | None) -> dict[str, Any]:
    """`GET v2/models[/{m}[/versions/{v}]]/stats`: times are sums over requests, in nanoseconds. Raises NotFound."""
    if model is None:
        versions = models.all()
    else:
        versions = [models.find(model, name) for name in (models.versions(model) if version is None else [version])]
    return {"model_stats": [_statistics_of(one) for one in versions]}


def _statistics_of(version: Servable) -> dict[str, Any]:
    stats = version.stats
    answered = stats.request_s.count
    none = {"count": 0, "ns": 0}
    return {
        "name": version.model,
        "version": version.version,
        "last_inference": int(stats.last_at * 1000),
        "inference_count": stats.rows,
        "execution_count": stats.batch_s.count,
        "inference_stats": {
            "success": _count(answered, stats.request_s.total),
            "fail": _count(stats.failed, stats.failed_s),
            "queue": _count(answered, stats.queue_s),
            "compute_input": _count(answered, stats.decode_s),
            "compute_infer": _count(answered, stats.infer_s),
            "compute_output": _count(answered, stats.encode_s),
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": none,
                "compute_infer": _count(int(count), seconds),
                "compute_output": none,
            }
            for rows, (count, seconds) in sorted(stats.runs_by_rows.items())
        ],
        "memory_usage": [],
    }


def _count(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}


def configuration(version: Servable) -> dict[str, Any]:
    """`GET v2/models/{m}/config`, which perf_analyzer reads before it starts. Raises NotReady."""
    loaded = version.program.loaded
    plan, signature = loaded.plan, loaded.session.signature
    specs = (*signature.inputs, *signature.outputs)
    batched = plan.batch and all(spec.shape and isinstance(spec.shape[0], str) for spec in specs)
    made: dict[str, Any] = {
        "name": version.model,
        "platform": loaded.platform,
        "backend": "onnxruntime",
        "version_policy": {"all": {}},
        "max_batch_size": plan.max_batch if batched else 0,
        "input": [_tensor(spec, batched) for spec in signature.inputs],
        "output": [_tensor(spec, batched) for spec in signature.outputs],
        "parameters": {"digest": {"string_value": loaded.digest}},
    }
    if batched:
        made["dynamic_batching"] = {
            "max_queue_delay_microseconds": round((version.policy.max_delay_s or 0.0) * 1e6),
            "preferred_batch_size": [],
            "priority_levels": PRIORITIES,
            "default_priority_level": USUAL,
        }
    return made


def _tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    """With batching the first dimension is left out."""
    shape = spec.shape[1:] if batched else spec.shape
    return {
        "name": spec.name,
        "data_type": f"TYPE_{spec.datatype}",
        "dims": [size if isinstance(size, int) else -1 for size in shape],
    }


def index(versions: Iterable[Servable], *, ready_only: bool) -> list[dict[str, str]]:
    """`POST v2/repository/index`."""
    return [
        {"name": one.model, "version": one.version, "state": _state_of(one), "reason": one.reason or _obstacle(one)}
        for one in versions
        if not ready_only or not one.obstacle
    ]


def _state_of(version: Servable) -> str:
    return "UNAVAILABLE" if _obstacle(version) else _STATES[version.state]


def _obstacle(version: Servable) -> str:
    """Why a loaded version does not answer."""
    return version.obstacle if version.state == "ready" else ""
