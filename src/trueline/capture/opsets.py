"""The opset of an ONNX program, by the release of ONNX Runtime that is to run it. Imports no torch.

Sources: the compatibility table of ONNX Runtime; ONNX's Versioning.md.
"""

import re
from collections.abc import Iterable

from trueline.errors import UsageError, join_names

FORMAT_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11}
"""Opset -> the version of the file format (ir_version) of the ONNX release that brought it. The exporter writes 18 and
later."""
_RELEASES = {14: 18, 15: 19, 16: 19, 17: 20}
"""Minor release of ONNX Runtime 1 -> its opset; later ones run these too."""
_RELEASE = re.compile(r"1\.(\d+)(\.\d+)?")


def opset_for(targets: Iterable[str]) -> int | None:
    """The opset that every release named in `targets` runs; None where no release is named. Raises UsageError.

    >>> opset_for(["onnxruntime@1.16", "cpp"]), opset_for(["onnxruntime"])
    (19, None)
    """
    found = [_of_release(target) for target in targets if "@" in target]
    return min(found, default=None)


def _of_release(target: str) -> int:
    name, _, release = target.partition("@")
    if name != "onnxruntime":
        raise UsageError(f"'{target}': a release is for onnxruntime alone", hint="for example --for onnxruntime@1.16")
    parsed = _RELEASE.fullmatch(release)
    if parsed is None:
        raise UsageError(f"'{release}' is no release of ONNX Runtime", hint="for example --for onnxruntime@1.16")
    minor = int(parsed[1])
    if minor < min(_RELEASES):
        raise UsageError(
            f"ONNX Runtime {release} is older than opset {min(FORMAT_VERSIONS)}, the first that the exporter writes",
            hint=f"ONNX Runtime 1.{min(_RELEASES)} or later, or `--for cpp`, which needs none",
        )
    return _RELEASES[min(minor, max(_RELEASES))]


def check_opset(opset: int | None) -> int | None:
    """`opset`, if the exporter writes it. Raises UsageError."""
    if opset is not None and opset not in FORMAT_VERSIONS:
        raise UsageError(f"opset is {opset!r}, expected one of: {join_names(map(str, FORMAT_VERSIONS))}")
    return opset
