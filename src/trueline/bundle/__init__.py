"""The thin waist:

what writes models and what runs them meet in a bundle, and nowhere else. No torch in this room.
"""

from trueline.bundle.golden import Golden
from trueline.bundle.guards import Guard
from trueline.bundle.pack import pack
from trueline.bundle.read import Bundle, open_bundle
from trueline.bundle.schema import BundleManifest, Evidence, ProgramEntry, Summary
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.bundle.unpack import unpack
from trueline.bundle.write import Contents, seal

__all__ = [
    "Bundle",
    "BundleManifest",
    "Contents",
    "Dim",
    "Evidence",
    "Golden",
    "Guard",
    "ProgramEntry",
    "Signature",
    "Summary",
    "TensorSpec",
    "open_bundle",
    "pack",
    "seal",
    "unpack",
]
