"""Classifies text with a model over bags of n-grams (nn.EmbeddingBag with offsets)."""

from typing import Any

import torch

from ..utils.util import PredictionException, class_to_explain, map_class_to_label
from .text_handler import TextHandler


class TextClassifier(TextHandler):
    """Answers {label: probability}. One text at a time: an archive that uses it has batchSize 1."""

    ngrams = 2

    def preprocess(self, data: Any) -> Any:
        """Numbers of the text's n-grams. Raises PredictionException for several texts, and for other data."""
        if len(data) != 1:
            raise PredictionException("the text classifier answers one text at a time; set batchSize to 1", 500)
        words = self._words(data[0].get("data") or data[0].get("body"))
        return torch.as_tensor([self._look_up(word) for word in words], dtype=torch.long, device=self.device)

    def _words(self, text: Any) -> list[str]:
        """The n-grams of a request's text."""
        if isinstance(text, bytes | bytearray):
            text = text.decode("utf-8", "replace")
        if not isinstance(text, str):
            raise PredictionException("send a text as 'data' or as the body", 400)
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        return self._ngrams(self._tokenize(self._remove_punctuation(self._remove_accented_characters(text))))

    def _ngrams(self, tokens: list[str]) -> list[str]:
        """The tokens, then each run of 2 up to `ngrams` of them."""
        runs = range(2, self.ngrams + 1)
        return [*tokens, *(" ".join(tokens[at : at + n]) for n in runs for at in range(len(tokens) - n + 1))]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return super().inference(data, torch.as_tensor([0], device=self.device))

    def postprocess(self, data: Any) -> Any:
        return map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping)

    def get_insights(self, tensor_data: Any, text: Any, target: Any = 0) -> Any:
        """[{words, importances}]: how much each n-gram adds to the score of the class `target`, by integrated gradients
        from embeddings of zeros. Raises PredictionException without an embedding.

        captum's LayerIntegratedGradients only sees the output of an EmbeddingBag, one vector for all n-grams, and
        nothing inside TorchScript; this works on the table's rows in both.
        Source: Sundararajan, Taly, Yan, Axiomatic Attribution for Deep Networks, ICML 2017.
        """
        table = _embedding(self.model)
        label = class_to_explain(target, self.inference(tensor_data))
        rows, repeated, times = tensor_data.unique(return_inverse=True, return_counts=True)
        whole = table.detach().clone()
        slope = torch.zeros_like(whole[rows])
        required = table.requires_grad
        try:
            table.requires_grad_(True)
            for step in range(STEPS):
                with torch.no_grad():
                    table.copy_(whole * ((step + 0.5) / STEPS))
                with torch.enable_grad():
                    score = self.model(tensor_data, torch.as_tensor([0], device=self.device))[0, label]
                (gradient,) = torch.autograd.grad(score, table)
                slope += gradient.to_dense()[rows] if gradient.is_sparse else gradient[rows]
        finally:
            with torch.no_grad():
                table.copy_(whole)
            table.requires_grad_(required)
        adds = (whole[rows] * slope / STEPS).sum(dim=1) / times
        return [{"words": self._words(text), "importances": adds[repeated].tolist()}]


STEPS = 50
"""Points on the path from zeros to the embeddings at which the gradient is computed."""


def _embedding(model: Any) -> Any:
    """The table of the model's first embedding, [tokens, features]."""
    for module in model.modules():
        if getattr(module, "original_name", type(module).__name__) in ("EmbeddingBag", "Embedding"):
            return module.weight
    raise PredictionException("the model has no nn.EmbeddingBag and no nn.Embedding to explain its words by", 501)
