"""What MLflow's pages show of a bundle: signature, example, requirements, the data set, and the lineage in words."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trueline.bundle.read import Bundle
from trueline.columns import answers
from trueline.columns.encoders import FittedLabel, FittedSeries
from trueline.errors import RegistryError
from trueline.version import __version__

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema

    from trueline.bundle.signature import TensorSpec
    from trueline.columns.encoders import FittedColumn
    from trueline.columns.fitted import FittedColumns

MAX_EXAMPLE = 200_000
"""Numbers, or signs of texts and images, in an input example; it is stored as JSON, twice."""
_RUNTIMES = {"onnx": ("onnxruntime",), "openvino": ("openvino",), "offload": ("torch", "onnxruntime")}
"""Libraries that run a program, by its format; the others need torch."""


def signature_of(bundle: Bundle) -> ModelSignature:
    """MLflow's signature: the columns of records where the bundle has them, else tensors with names, dtypes and fixed
    sizes. The bundle checks after it what it has proven.

    Raises RegistryError for a bundle that has no signature: MLflow would take any input.
    """
    from mlflow.models import ModelSignature

    if not bundle.signature.inputs or not bundle.signature.outputs:
        raise RegistryError(
            f"the bundle {bundle.name} has no signature: MLflow would accept every input",
            hint="capture the model again, with an example of its inputs",
        )
    outputs = _tensors(bundle.signature.outputs)
    fitted = bundle.columns()
    if fitted is None:
        return ModelSignature(_tensors(bundle.signature.inputs), outputs)
    return ModelSignature(columns_of(fitted), _answers_of(bundle, fitted) or outputs)


def _tensors(specs: Sequence[TensorSpec]) -> Schema:
    from mlflow.types import Schema
    from mlflow.types import TensorSpec as MlflowSpec

    shapes = [tuple(-1 if isinstance(size, str) else size for size in spec.shape) for spec in specs]
    return Schema([MlflowSpec(spec.dtype, shape, spec.name) for spec, shape in zip(specs, shapes, strict=True)])


def columns_of(fitted: FittedColumns, *, labels: bool = False) -> Schema:
    """The columns that records have; optional where the recipe says what stands in the place of a missing value."""
    from mlflow.types import ColSpec, Schema

    chosen = [one for one in fitted.columns if labels or not isinstance(one, FittedLabel)]
    return Schema([ColSpec(_type_of(one), one.name, required=not _is_optional(one)) for one in chosen])


def _is_optional(column: FittedColumn) -> bool:
    return getattr(column.declared, "missing", "error") != "error"


def _type_of(column: FittedColumn) -> Any:
    """MLflow takes no whole numbers for `double` and no fractions for `long`, and pandas reads whole numbers as
    fractions if a cell is empty: such a column, and one of lists of numbers, has MLflow's type `any`, and is checked by
    the bundle alone."""
    from mlflow.types.schema import AnyType

    if isinstance(column, FittedSeries) or (column.type == "whole" and _is_optional(column)):
        return AnyType()  # type: ignore[no-untyped-call]
    return {"whole": "long", "number": "double", "boolean": "boolean", "binary": "binary"}.get(column.type, "string")


def _answers_of(bundle: Bundle, fitted: FittedColumns) -> Schema | None:
    """`class` and `probabilities`, or `value`; None where answers are the outputs as they are."""
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import Map

    outputs = bundle.golden()[0].outputs
    if len(outputs) != 1 or answers.find_output(fitted, outputs) is None:
        return None
    if fitted.labels[0].declared.number:
        return Schema([ColSpec(DataType.double, answers.VALUE)])
    probabilities = ColSpec(Map(DataType.double), answers.PROBABILITIES)
    return Schema([ColSpec(DataType.string, answers.CLASS), probabilities])


def save_example(model: Model, bundle: Bundle, folder: Path) -> None:
    """Writes the model's input example, unless it is large: the first golden record by columns, or the smallest golden
    case."""
    from mlflow.models.utils import _save_example

    fitted = bundle.columns()
    if fitted is not None:
        import pandas

        record = bundle.golden_records()[0]
        cells = {
            one.name: base64.b64decode(record[one.name]) if one.type == "binary" else record[one.name]
            for one in fitted.columns
            if record.get(one.name) is not None
        }
        if sum(len(value) for value in cells.values() if isinstance(value, str | bytes | list)) <= MAX_EXAMPLE:
            _save_example(model, pandas.DataFrame([cells]), str(folder))
        return
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
        schema=_data_schema(bundle),
        profile=json.dumps({"num_rows": counted}) if counted else None,
    )  # fmt: skip
    context = "training" if trained else "evaluation"
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _data_schema(bundle: Bundle) -> str:
    """As MLflow's own data sets write it: the records' columns with the label, or the model's inputs."""
    fitted = bundle.columns()
    if fitted is not None:
        return json.dumps({"mlflow_colspec": columns_of(fitted, labels=True).to_dict()})
    return json.dumps({"mlflow_tensorspec": {"features": _tensors(bundle.signature.inputs).to_dict(), "targets": None}})


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
    fitted = bundle.columns()
    if fitted is not None:
        learned = f" → {', '.join(one.name for one in fitted.labels)}" if fitted.labels else ""
        rows.append(("columns", f"{', '.join(fitted.input_columns)}{learned}"))
    for spec in manifest.signature.inputs if fitted is None else ():
        rows.append((f"input `{spec.name}`", f"{spec.datatype} [{', '.join(map(str, spec.shape))}]"))
    for name, size in manifest.signature.dims.items():
        rows.append((f"size `{name}`", f"from {size.min} {f'to {size.max}' if size.max else 'up'}"))
    if manifest.lineage.parent:
        rows.append(("parent", f"bundle `{manifest.lineage.parent[:16]}`"))
    rows.append(("bundle", f"sha256 `{bundle.digest}`, {len(manifest.golden)} golden records"))
    table = "\n".join(f"| {name} | {text} |" for name, text in rows)
    return f"Captured and proven by Trueline {__version__}.\n\n| | |\n|---|---|\n{table}\n"
