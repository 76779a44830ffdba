"""ElasticDL's embedding layer by id, for its recipes as they stand: `Embedding(output_dim, combiner="mean")`."""

from torch import nn

from trueline.errors import RecipeError
from trueline.ps.model.embedding import Embedding, EmbeddingBag

_INITIALIZERS = {
    "uniform": ("uniform", 0.05),
    "normal": ("normal", 0.05),
    "zeros": ("zeros", 0.0),
    "zero": ("zeros", 0.0),
}
"""Keras's spellings and their bounds."""


def make_layer(
    output_dim: int, input_dim: int | None = None, embeddings_initializer: str = "uniform", *, mask_zero: bool = False,
    input_length: int | None = None, combiner: str | None = None, name: str = "",
) -> nn.Module:  # fmt: skip
    """An `Embedding`, or with `combiner` (sum, mean) an `EmbeddingBag`. `input_dim` and `input_length` are bounds that
    a table without a vocabulary does not need. Raises RecipeError for what it does not have.

    Source: elasticdl/python/elasticdl/layers/embedding.py.
    """
    if embeddings_initializer not in _INITIALIZERS:
        raise RecipeError(
            f"an ElasticDL Embedding has embeddings_initializer={embeddings_initializer!r}, expected one of "
            f"{', '.join(_INITIALIZERS)}",
            hint="trueline.Embedding(dim, init=..., scale=...) has bounds of your own",
        )
    if combiner not in (None, "sum", "mean"):
        raise RecipeError(f"an ElasticDL Embedding has combiner={combiner!r}, expected sum, mean or None")
    init, scale = _INITIALIZERS[embeddings_initializer]
    options = {"init": init, "scale": scale, "name": name, **({"padding_idx": 0} if mask_zero else {})}
    if combiner is None:
        return Embedding(output_dim, **options)  # type: ignore[arg-type]
    return EmbeddingBag(output_dim, combiner, **options)  # type: ignore[arg-type]
