"""The schema of `bundle.json` and its digest. Pure.

    my-model.bundle/
      bundle.json                  this schema; has the SHA-256 and size of every other file
      programs/model.onnx          one file for each program that was proven
      programs/model.pt2           torch.export; model.ts: TorchScript; model.so.pt2: AOTInductor;
                                   model.offload.json: a plan, with its .pt2 and .onnx beside it
      golden/inputs.safetensors    "1/x", "4/x": case, then input; a case is one batch
      golden/outputs.safetensors   "1/logits", "4/logits": the eager model's answers
      golden/bounds.safetensors    "1/logits/0", …: how far an answer may be off, of the whole and along each axis
      columns.json                 how records become inputs, and outputs class names, if the recipe declares columns
      golden/records.json          the records of the golden case "records", from which columns.json makes its inputs
      evidence.jsonl               one line for each comparison
      lineage.json                 where the model came from

The digest is of the manifest's canonical form (keys sorted, no spaces, the digest itself empty), and so covers every
file through the table: one digest names one bundle.
"""

from typing import Any, Literal

import msgspec

from trueline import files
from trueline.bundle import guards
from trueline.bundle.signature import NUMPY_DTYPES, Rows, Signature
from trueline.bundle.values import Values
from trueline.errors import BundleError

SCHEMA = 1
MANIFEST = "bundle.json"
EVIDENCE = "evidence.jsonl"
LINEAGE = "lineage.json"
GOLDEN_INPUTS = "golden/inputs.safetensors"
GOLDEN_OUTPUTS = "golden/outputs.safetensors"
GOLDEN_BOUNDS = "golden/bounds.safetensors"
GOLDEN_RECORDS = "golden/records.json"
COLUMNS = "columns.json"
RECORDS_CASE = "records"
"""The golden case that golden/records.json has as records."""
MANIFEST_BYTES = 16 * 2**20
"""No manifest is larger; a reader takes no more into memory before it has verified anything."""


MAX_NAME = 1024
"""Characters of a model's, tensor's or size's name."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the bundle."""

    sha256: str
    size: int


BY_RECORD = "one record after the other"
"""In a program's notes: it runs a batch record by record, no faster than single requests."""


class ProgramEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One program. Its digest is in the table of files under `file`."""

    format: str
    file: str
    proven: bool
    seconds: float
    """Time to emit and prove it."""
    probes: int
    max_abs_error: float
    """Largest difference from the eager model over all probes inside the proven range."""
    versions: dict[str, str]
    notes: str = ""
    """How it was made and its drawbacks, where they differ from others of its format."""
    rows: dict[str, Rows] = {}
    """Conditions on masks for this program, see `TensorSpec.rows`."""
    values: dict[str, Values] = {}
    """Conditions on the values of its inputs, see `TensorSpec.values`."""
    fixed: dict[str, int] = {}
    """Sizes by symbol, for which its runtime compiles it a second time, for requests of these sizes alone."""

    @property
    def by_record(self) -> bool:
        """Whether batching gains nothing."""
        return BY_RECORD in self.notes


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head of the lineage in `lineage.json`."""

    recipe: str
    recipe_digest: str
    checkpoint_digest: str | None = None
    step: int | None = None
    parent: str | None = None
    """Digest of the bundle that this one was made from."""


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`bundle.json`."""

    schema: int
    name: str
    created: str
    signature: Signature
    programs: tuple[ProgramEntry, ...]
    serve: str
    """Format of the program to serve."""
    golden: tuple[str, ...]
    """Names of the golden cases, in order."""
    files: dict[str, FileEntry]
    lineage: Summary
    digest: str = ""


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One comparison: a program against the eager model on one probe."""

    format: str
    against: str
    probe: str
    origin: Literal["given", "made"]
    """`given`: records of the user; `made`: values of the prober."""
    inputs_sha256: str
    shapes: dict[str, tuple[int, ...]]
    verdict: Literal["agrees", "disagrees", "outside", "unanswered"]
    """`outside`: beyond the range, so that the session rejects it; `unanswered`: the eager model raised."""
    reason: str = ""
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    tolerance: str = ""
    versions: dict[str, str] = {}


class _Head(msgspec.Struct):
    """The part of any manifest that names its schema."""

    schema: int


def canonical(manifest: BundleManifest) -> bytes:
    """The bytes of the digest."""
    return msgspec.json.encode(msgspec.structs.replace(manifest, digest=""), order="sorted")


def with_digest(manifest: BundleManifest) -> BundleManifest:
    """`manifest` with its digest."""
    return msgspec.structs.replace(manifest, digest=files.sha256_bytes(canonical(manifest)))


def _digest_of(text: bytes) -> str:
    """The digest of what `text` says, with the fields that it has: fields that were added later have defaults."""
    fields = msgspec.json.decode(text, type=dict[str, Any])
    return files.sha256_bytes(msgspec.json.encode(fields | {"digest": ""}, order="sorted"))


def encode(manifest: BundleManifest) -> bytes:
    """The manifest as the text of `bundle.json`."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode(text: bytes, where: str) -> BundleManifest:
    """The manifest in `text`. Raises BundleError that names `where` if it is torn, edited or of another schema."""
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.schema != SCHEMA:
            raise BundleError(
                f"{where} follows bundle schema {head.schema}, this Trueline reads schema {SCHEMA}",
                hint="open it with the Trueline that wrote it, or capture the model again",
            )
        manifest = msgspec.json.decode(text, type=BundleManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{where} is torn or no bundle manifest: {error}", hint=AGAIN) from error
    if _digest_of(text) != manifest.digest:
        raise BundleError(f"{where} was changed after it was sealed: its digest does not match", hint=AGAIN)
    _check_sense(manifest, where)
    return manifest


AGAIN = "copy the bundle again from where it was made, or capture the model again"


def _check_sense(manifest: BundleManifest, where: str) -> None:
    formats = [program.format for program in manifest.programs]
    if manifest.serve not in formats:
        raise BundleError(f"{where} serves format '{manifest.serve}', but holds: {', '.join(formats) or 'none'}")
    if not manifest.golden:
        raise BundleError(f"{where} names no golden record: nothing could show whether it answers correctly here")
    for name in (*(program.file for program in manifest.programs), GOLDEN_INPUTS, GOLDEN_OUTPUTS, EVIDENCE, LINEAGE):
        if name not in manifest.files:
            raise BundleError(f"{where} names {name}, which its table of files does not hold")
    if (COLUMNS in manifest.files) != (GOLDEN_RECORDS in manifest.files):
        raise BundleError(f"{where} holds only one of {COLUMNS} and {GOLDEN_RECORDS}, which belong together")
    for name in manifest.files:
        check_name(name, where)
    specs = (*manifest.signature.inputs, *manifest.signature.outputs)
    for spec in specs:
        if spec.datatype not in NUMPY_DTYPES or any(isinstance(size, int) and size < 0 for size in spec.shape):
            kind = f"{spec.datatype[:32]!r} of the shape {list(spec.shape)[:8]}"
            raise BundleError(f"{where} has '{spec.name[:64]}' as {kind}, which no tensor has")
    for name in (manifest.name, *manifest.golden, *manifest.signature.dims, *(spec.name for spec in specs)):
        if not name.isprintable() or len(name) > MAX_NAME:  # it becomes part of logs, terminals and source text
            raise BundleError(
                f"{where} has the name {name[:64]!r}, which is not printable text of at most {MAX_NAME} characters",
                hint="do not use this bundle: it was not made by Trueline",
            )
    inputs = {spec.name for spec in manifest.signature.inputs}
    for program in manifest.programs:
        for name in (program.rows.keys() | program.values.keys()) - inputs:
            raise BundleError(f"{where} has a condition on values of '{name}', which is no input of the model")
        if program.fixed and (
            program.fixed.keys() != manifest.signature.symbols.keys() or not manifest.signature.allows(program.fixed)
        ):
            raise BundleError(f"{where} has a program compiled for {program.fixed}, which its signature does not take")
        for values in program.values.values():
            if values.size and values.size not in manifest.signature.symbols:
                raise BundleError(f"{where} has a range up to '{values.size}', which is no size of an input")
    for symbol in manifest.signature.padded:
        if symbol not in manifest.signature.symbols:
            raise BundleError(f"{where} lists '{symbol}' as padded, which is no size of an input")
    for guard in manifest.signature.guards:
        try:
            guards.check(guard, manifest.signature.dims)
        except ValueError as error:
            raise BundleError(f"{where} has a guard that cannot be read: {error}", hint=AGAIN) from error


def check_name(name: str, where: str) -> None:
    """Raises BundleError for a name that is not a plain relative path inside the bundle."""
    outside = any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or not name.isprintable()
    if outside or name == MANIFEST or len(name) > 255:
        raise BundleError(
            f"{where} names the file {name!r}, which is not a plain path inside the bundle",
            hint="do not use this bundle: it was not made by Trueline",
        )
