"""The quantizers by the kind of their methods, the most promising first."""

from __future__ import annotations

from collections.abc import Mapping

from trueline.compress.apply.contract import Quantizer
from trueline.compress.apply.dynamic import DynamicQuantizer
from trueline.compress.apply.half import HalfQuantizer
from trueline.compress.apply.inductor import InductorQuantizer
from trueline.compress.apply.openvino import OpenVinoQuantizer, OpenVinoUnchanged
from trueline.compress.apply.static import StaticQuantizer
from trueline.compress.apply.unchanged import NoQuantizer
from trueline.compress.apply.weights import WeightQuantizer
from trueline.compress.method import UNCHANGED

QUANTIZERS: Mapping[str, Quantizer] = {
    "static": StaticQuantizer(),
    "dynamic": DynamicQuantizer(),
    "openvino": OpenVinoQuantizer(),
    "openvino-fp32": OpenVinoUnchanged(),
    "weights": WeightQuantizer(),
    "float16": HalfQuantizer("float16"),
    "bfloat16": HalfQuantizer("bfloat16"),
    "inductor": InductorQuantizer(),
    UNCHANGED: NoQuantizer(),
}
