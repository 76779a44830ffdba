"""What MLflow's pages show of a bundle: signature, example, requirements, the data set, and the lineage in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trueline.bundle.read import Bundle
from trueline.errors import RegistryError
from trueline.version import __version__

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput
    from mlflow.models import Model, ModelSignature

    from trueline.bundle.signature import TensorSpec

MAX_EXAMPLE = 200_000
"""Numbers in an input example; it is stored as JSON, twice."""
_RUNTIMES = {"onnx": ("onnxruntime",), "openvino": ("openvino",), "offload": ("torch", "onnxruntime")}
"""Libraries that run a program, by its format; the others need torch."""


def signature_of(bundle: Bundle) -> ModelSignature:
    """MLflow's signature, which checks names, dtypes and fixed sizes; the Session checks the proven range after it.
    Raises RegistryError for a bundle that has none: MLflow would take any input."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema
    from mlflow.types import TensorSpec as MlflowSpec

    def schema(specs: Sequence[TensorSpec]) -> Any:
        shapes = [tuple(-1 if isinstance(size, str) else size for size in spec.shape) for spec in specs]
        return Schema([MlflowSpec(spec.dtype, shape, spec.name) for spec, shape in zip(specs, shapes, strict=True)])

    if not bundle.signature.inputs or not bundle.signature.outputs:
        raise RegistryError(
            f"the bundle {bundle.name} has no signature: MLflow would accept every input",
            hint="capture the model again, with an example of its inputs",
        )
    return ModelSignature(schema(bundle.signature.inputs), schema(bundle.signature.outputs))


def save_example(model: Model, bundle: Bundle, folder: Path) -> None:
    """Writes the smallest golden record as the model's input example, unless it is large."""
    from mlflow.models.utils import _save_example

    smallest = min(bundle.golden(), key=lambda one: sum(array.size for array in one.inputs.values()))
    if sum(array.size for array in smallest.inputs.values()) <= MAX_EXAMPLE:
        _save_example(model, {name: np.array(array) for name, array in smallest.inputs.items()}, str(folder))


def requirements_of(bundle: Bundle) -> list[str]:
    """Requirements that pip can install: this Trueline from where it was installed, and what runs the programs."""
    needed = {name for one in bundle.manifest.programs for name in _RUNTIMES.get(one.format, ("torch",))}
    return [_trueline(), f"mlflow=={version('mlflow')}", *(_pin(name) for name in sorted(needed))]


def _trueline() -> str:
    """This package as a requirement. One that came from a folder, a file or a repository is named by its URL (PEP
    610)."""
    try:
        origin = json.loads(distribution("trueline").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    if "url" not in origin:
        return f"trueline=={__version__}"
    source = origin.get("vcs_info")
    repository = f"{source['vcs']}+{origin['url']}@{source['commit_id']}" if source else ""
    return f"trueline @ {repository or origin['url']}"


def _pin(name: str) -> str:
    """`name` in the installed version, without its local part (`+cpu`), which no index has; else in any version."""
    try:
        return f"{name}=={version(name).partition('+')[0]}"
    except PackageNotFoundError:
        return name


def dataset_of(bundle: Bundle, facts: Mapping[str, Any]) -> DatasetInput:
    """The training records as MLflow's data set: their fingerprint, and their number where the job is known."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    lineage = bundle.lineage()
    trained = (lineage.get("checkpoint") or {}).get("data")
    data = lineage.get("data") or {}
    fingerprint = str(trained or data.get("fingerprint") or bundle.manifest.lineage.recipe_digest)
    counted = facts.get("records") if trained else data.get("num_records")
    source = {"recipe": bundle.manifest.lineage.recipe, "fingerprint": fingerprint}
    dataset = Dataset(
        name=f"{bundle.manifest.lineage.recipe}-{'training' if trained else data.get('mode', 'examples')}",
        digest=fingerprint[:36], source_type="trueline", source=json.dumps(source),
        profile=json.dumps({"num_records": counted}) if counted else None,
    )  # fmt: skip
    context = "training" if trained else "evaluation"
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _largest_difference(bundle: Bundle, format: str) -> str:
    """On the records that were given: those that the prober makes may be huge, and so are their differences."""
    compared = (one for one in bundle.evidence() if one.format == format and one.origin == "given")
    found = [one.max_abs_error for one in compared if one.max_abs_error is not None]
    return f", largest difference on real records {max(found):.1e}" if found else ""


def describe_lineage(bundle: Bundle, facts: Mapping[str, Any]) -> str:
    """The way from recipe and data to the proven programs, as Markdown for the model's page. `facts`: of the job."""
    lineage, manifest = bundle.lineage(), bundle.manifest
    checkpoint = lineage.get("checkpoint") or {}
    rows = [("recipe", f"{manifest.lineage.recipe}, sha256 `{manifest.lineage.recipe_digest[:16]}`")]
    if weights := checkpoint.get("weights"):
        new = f"; new layers: {', '.join(weights['new'])}" if weights.get("new") else ""
        rows.append(("began from", f"`{weights['file']}`, sha256 `{weights['digest'][:16]}`{new}"))
    if facts.get("job"):
        records = f", {facts['records']} records" if facts.get("records") else ""
        rows.append(("trained by", f"job `{facts['job']}`: {facts.get('steps', '?')} steps{records}"))
    certificates = lineage.get("certificates") or []
    if certificates and all(one.get("tally_max") in (1, -1) for one in certificates):
        rows.append(("records", f"each applied at most once in each of {len(certificates)} epochs (certified)"))
    if checkpoint:
        step = f"step {checkpoint['step']}, " if "step" in checkpoint else f"`{checkpoint.get('file', '')}`, "
        rows.append(("checkpoint", f"{step}sha256 `{str(checkpoint.get('digest'))[:16]}`"))
    for one in manifest.programs:
        served = ", served" if one.format == manifest.serve else ""
        rows.append((one.format, f"proven on {one.probes} probes{_largest_difference(bundle, one.format)}{served}"))
    for spec in manifest.signature.inputs:
        rows.append((f"input `{spec.name}`", f"{spec.datatype} [{', '.join(map(str, spec.shape))}]"))
    for name, size in manifest.signature.dims.items():
        rows.append((f"size `{name}`", f"from {size.min} {f'to {size.max}' if size.max else 'up'}"))
    if manifest.lineage.parent:
        rows.append(("parent", f"bundle `{manifest.lineage.parent[:16]}`"))
    rows.append(("bundle", f"sha256 `{bundle.digest}`, {len(manifest.golden)} golden records"))
    table = "\n".join(f"| {name} | {text} |" for name, text in rows)
    return f"Captured and proven by Trueline {__version__}.\n\n| | |\n|---|---|\n{table}\n"
