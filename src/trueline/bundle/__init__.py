"""The sealed folder between the code that writes models and the code that runs them. Imports no torch."""

from trueline.bundle.golden import Golden
from trueline.bundle.guards import Guard
from trueline.bundle.read import Bundle, open_bundle, unpack
from trueline.bundle.schema import BundleManifest, Evidence, ProgramEntry, Summary
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.bundle.write import Contents, pack, seal

__all__ = [
    "Bundle", "BundleManifest", "Contents", "Dim", "Evidence", "Golden", "Guard", "ProgramEntry", "Signature",
    "Summary", "TensorSpec", "open_bundle", "pack", "seal", "unpack",
]  # fmt: skip
