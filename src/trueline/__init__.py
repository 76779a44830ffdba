"""One line from an eager PyTorch model to production, proven at every hand-over.

    import trueline

    recipe = trueline.load_recipe("recipe.py")
    result = trueline.train(recipe, workers="3")
    trueline.capture(recipe, result.checkpoint, "digits.bundle")

Importing this package imports no torch: each verb is imported when it is first used (PEP 562). A verb with the name of
a package (train, capture, serve) is the package itself, which is callable; see `_verbs`.
"""

import importlib
from typing import TYPE_CHECKING

from trueline.version import __version__

if TYPE_CHECKING:
    from trueline.batch.evaluate import evaluate as evaluate
    from trueline.batch.predict import predict as predict
    from trueline.bundle.read import open_bundle as inspect  # noqa: F401 (it is in __all__)
    from trueline.capture.api import capture as capture
    from trueline.capture.verify import verify as verify
    from trueline.compress.api import compress as compress
    from trueline.doctor.api import doctor as doctor
    from trueline.ps.model.embedding import Embedding as Embedding
    from trueline.ps.model.embedding import EmbeddingBag as EmbeddingBag
    from trueline.ps.model.strategy import RowwiseAdagrad as RowwiseAdagrad
    from trueline.ps.publish import publish as publish
    from trueline.recipe.load import load_recipe as load_recipe
    from trueline.registry import register as register
    from trueline.serve.api import serve as serve
    from trueline.ship import ship as ship
    from trueline.train.api import train as train
    from trueline.train.elastic import Elastic as Elastic
    from trueline.train.step.joint import JointOptimizer as JointOptimizer
    from trueline.train.step.options import Options as Options
    from trueline.train.step.validation import Rule as Rule
    from trueline.train.step.validation import Validation as Validation

_WHERE = {
    "Elastic": "trueline.train.elastic:Elastic",
    "Embedding": "trueline.ps.model.embedding:Embedding",
    "EmbeddingBag": "trueline.ps.model.embedding:EmbeddingBag",
    "JointOptimizer": "trueline.train.step.joint:JointOptimizer",
    "Options": "trueline.train.step.options:Options",
    "RowwiseAdagrad": "trueline.ps.model.strategy:RowwiseAdagrad",
    "Rule": "trueline.train.step.validation:Rule",
    "Validation": "trueline.train.step.validation:Validation",
    "capture": "trueline.capture",
    "compress": "trueline.compress",
    "doctor": "trueline.doctor",
    "evaluate": "trueline.batch.evaluate:evaluate",
    "inspect": "trueline.bundle.read:open_bundle",
    "load_recipe": "trueline.recipe.load:load_recipe",
    "predict": "trueline.batch.predict:predict",
    "publish": "trueline.ps.publish:publish",
    "register": "trueline.registry:register",
    "serve": "trueline.serve",
    "ship": "trueline.ship",
    "train": "trueline.train",
    "verify": "trueline.capture.verify:verify",
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'trueline' has no attribute '{name}'")
    path, _, attribute = _WHERE[name].partition(":")
    from trueline.extras import naming_extras

    with naming_extras():
        module = importlib.import_module(path)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
