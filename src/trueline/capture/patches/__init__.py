"""Workarounds for defects of torch, onnxscript and ONNX Runtime, one in each module. `make patches` lists them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """When a workaround can be deleted. `tests/capture/patches/test_expiry.py` runs its reproducer."""

    issue: str
    """owner/repository#number; "none found" where a search found none."""
    versions: str
    """Releases that have the defect; the expiry test decides for later ones."""
    cost: str
    """Of each export, or of the programs that need it."""
    helps: tuple[str, ...]
    """Models, of the benchmark's zoo and of other libraries, that are refused, slow or bound to fewer sizes without it;
    ("all",) for every export. One that helps fewer than two models is deleted."""
