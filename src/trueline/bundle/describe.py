"""Describes a bundle for `trueline bundle inspect`, as text and as JSON of the same values. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from trueline.bundle.guard_words import describe_guard
from trueline.bundle.read import Bundle
from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.columns.describe import HEAD, rows_of


def describe(bundle: Bundle) -> str:
    """The bundle as aligned plain text."""
    manifest, lineage = bundle.manifest, bundle.lineage()
    parts = [
        _align([("bundle", manifest.name), ("digest", manifest.digest), ("created", manifest.created)]),
        "signature\n" + _align(_signature_rows(bundle), indent=2),
        *_columns(bundle),
        "programs\n" + _align([*program_rows(bundle), *_note_rows(bundle)], indent=2),
        *_attempts(lineage.pop("attempts", None)),
        "evidence\n" + _align(_evidence_rows(bundle.evidence()), indent=2),
        "golden records\n" + _align(golden_rows(bundle), indent=2),
        "lineage\n" + _align(lineage_rows(lineage), indent=2),
    ]
    return "\n\n".join(parts) + "\n"


def to_json(bundle: Bundle) -> dict[str, Any]:
    """The same as values that JSON can hold."""
    manifest, evidence = msgspec.to_builtins((bundle.manifest, list(bundle.evidence())))
    return {"path": str(bundle.path), "manifest": manifest, "evidence": evidence, "lineage": bundle.lineage()}


def dim_text(name: str, dim: Dim) -> str:
    """A proven range in words.

    >>> dim_text("batch", Dim(min=1, max=6))
    'batch from 1 to 6'
    >>> dim_text("batch", Dim(max=4096, probed=True))
    'batch from 1 to 4096 (probed so far)'
    """
    upper = "up, no bound" if dim.max is None else f"to {dim.max}"
    step = "" if dim.multiple_of == 1 else f", multiples of {dim.multiple_of}"
    return f"{name} from {dim.min} {upper}{step}{' (probed so far)' if dim.probed else ''}"


def sizes_text(sizes: Mapping[str, int]) -> str:
    """
    >>> sizes_text({"batch": 1, "length": 128})
    'batch 1, length 128'
    """
    return ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())


def range_text(signature: Signature) -> str:
    """All conditions on the sizes and masks of a request, in one line."""
    ranges = [dim_text(name, signature.dims[name]) for name in signature.symbols]
    needs = [spec.needs for spec in signature.inputs if spec.needs]
    return "; ".join([*ranges, *_describe_guards(signature), *needs])


def _signature_rows(bundle: Bundle) -> list[tuple[str, ...]]:
    signature = bundle.signature
    rows: list[tuple[str, ...]] = [("input", *_spec_row(spec)) for spec in signature.inputs]
    rows += [("output", *_spec_row(spec)) for spec in signature.outputs]
    for given, left in signature.state.items():
        rows.append(("state", f"{left} of an answer is {given} of the next request"))
    if signature.random:
        rows.append(("random", "equal requests get different answers; they were compared as draws of one distribution"))
    free = {symbol for spec in signature.inputs for symbol in spec.shape if isinstance(symbol, str)}
    rows += [("proven", dim_text(name, dim)) for name, dim in signature.dims.items() if name in free]
    rows += [("padded", f"{name} may be padded at its end, hidden by a mask") for name in signature.padded]
    return rows + [("needs", words) for words in _describe_guards(signature)]


def _describe_guards(signature: Signature) -> list[str]:
    return [describe_guard(guard, signature.dims) for guard in signature.guards]


def _spec_row(spec: TensorSpec) -> tuple[str, str, str]:
    return spec.name, spec.datatype, "[" + ", ".join(map(str, spec.shape)) + "]"


def largest_given_error(evidence: Iterable[Evidence]) -> float:
    """The largest absolute error on records of the user. On made inputs of up to 1e30 it is a large number, on tiny
    answers the relative one is 1: neither says anything.
    """
    given = (one for one in evidence if one.origin == "given" and one.verdict == "agrees")
    return max((one.max_abs_error or 0.0 for one in given), default=0.0)


def program_rows(bundle: Bundle) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("format", "file", "size", "probes", "error", "verdict", "sha256")]
    evidence = tuple(bundle.evidence())
    for program in bundle.manifest.programs:
        entry = bundle.manifest.files[program.file]
        verdict = "proven" if program.proven else "not proven"
        served = ", served" if program.format == bundle.manifest.serve else ""
        stem = program.file.removesuffix(".json")  # with the weights in `model.onnx.data`, and the parts of a plan
        size = sum(entry.size for name, entry in bundle.manifest.files.items() if name.startswith(stem))
        found = largest_given_error([one for one in evidence if one.format == program.format])
        error, digest = f"{found:.2g}", entry.sha256[:12]
        rows.append((program.format, program.file, f"{size} B", str(program.probes), error, verdict + served, digest))
    return rows


def _note_rows(bundle: Bundle) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for program in bundle.manifest.programs:
        needs = [f"only where {spec.needs}" for spec in bundle.signature_of(program.format).inputs if spec.needs]
        fixed = f"compiled once more for {sizes_text(program.fixed)} alone" if program.fixed else ""
        rows += [(f"{program.format}: {note}",) for note in (*needs, fixed, program.notes) if note]
    return rows


def _attempts(found: object) -> list[str]:
    """Every format that was tried, also those that the bundle does not hold; nothing if there is no record."""
    tried = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    rows: list[tuple[str, ...]] = [("format", "verdict", "seconds", "size", "probes", "why")]
    for one in tried:
        cells = {key: str(value) for key, value in one.items()}
        verdict = cells.get("verdict", "") + ("" if one.get("emitted", True) else ", not emitted")
        size = f"{cells['size_bytes']} B" if "size_bytes" in cells else ""
        why = "; see ".join(filter(None, (cells.get("why"), cells.get("line"))))
        rows.append((cells.get("format", ""), verdict, cells.get("seconds", ""), size, cells.get("probes", ""), why))
    return ["attempts\n" + _align(rows, indent=2)] if tried else []


def _evidence_rows(evidence: Iterable[Evidence]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("format", "probe", "verdict", "max error", "reason")]
    for one in evidence:
        error = "" if one.max_abs_error is None else f"{one.max_abs_error:.2g}"
        rows.append((one.format, one.probe, one.verdict, error, one.reason))
    counts = Counter(row[2] for row in rows[1:])
    rows.append(("total", ", ".join(f"{count} {verdict}" for verdict, count in counts.items())))
    return rows


def lineage_rows(lineage: dict[str, Any], prefix: str = "") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, value in lineage.items():
        if isinstance(value, dict) and value:
            rows += lineage_rows(value, f"{prefix}{key}.")
        elif key == "certificates" and value and all(one.keys() >= _CERTIFIED for one in value):
            rows += [(prefix + key, line) for line in _certificate_lines(value)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            rows += [row for i, one in enumerate(value) for row in lineage_rows(one, f"{prefix}{key}.{i}.")]
        else:
            rows.append((prefix + key, "none" if value in (None, [], {}) else str(value)))
    return rows


_CERTIFIED = {"epoch", "steps", "records", "digest", "tally_min", "tally_max"}


_REDUCTIONS = {
    "mean": "the mean over its records",
    "sum": "the sum over its records",
    "weighted": "the mean by the weights of its records",
}


def describe_loss(certified: Mapping[str, Any]) -> str:
    """The loss of a step, by what a certificate or the lineage of a checkpoint says of it.

    >>> describe_loss({"reduction": "sum"}), describe_loss({"reduction": "mean", "shard_records": 8})
    ('the sum over its records', 'the mean over its records, computed over whole shards of 8')
    """
    shards = f", computed over whole shards of {certified['shard_records']}" if certified.get("shard_records") else ""
    return f"{_REDUCTIONS.get(certified['reduction'], certified['reduction'])}{shards}"


def _times(certified: Mapping[str, Any]) -> str:
    low, high = certified["tally_min"], certified["tally_max"]
    return "each once" if low == high == 1 else f"each {low} to {high} times"


def _certificate_lines(certificates: Sequence[dict[str, Any]]) -> list[str]:
    """The certificates of the training job's epochs; epochs with equal ones share a line."""
    alike: dict[str, list[int]] = {}
    for one in certificates:
        times = "counted by digest" if one["tally_min"] < 0 else _times(one)
        line = f"{one['records']} records in {one['steps']} steps, {times}, digest {one['digest']:06x}"
        line += f", loss: {describe_loss(one)}" if one.get("reduction") else ""
        alike.setdefault(line, []).append(one["epoch"])
    return [f"epochs {min(epochs)} to {max(epochs)} ({len(epochs)}): {line}" for line, epochs in alike.items()]


def _columns(bundle: Bundle) -> list[str]:
    fitted = bundle.columns()
    return [] if fitted is None else ["columns\n" + _align([HEAD, *rows_of(fitted)], indent=2)]


def golden_rows(bundle: Bundle) -> list[tuple[str, ...]]:
    """Each golden case with the shapes of its inputs, in the order of the signature."""
    names = [spec.name for spec in bundle.signature.inputs]
    return [
        (one.case, ", ".join(f"{name} {list(one.inputs[name].shape)}" for name in names if name in one.inputs))
        for one in bundle.golden()
    ]


def _align(rows: Sequence[tuple[str, ...]], *, indent: int = 0) -> str:
    columns = max((len(row) for row in rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row) - 1), default=0) for i in range(columns)]
    lines = ("  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows)
    return "\n".join(" " * indent + line for line in lines)
