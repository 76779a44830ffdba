"""The classes of a text, by a model over bags of n-grams (nn.EmbeddingBag with offsets)."""

from __future__ import annotations

from typing import Any

import torch

from ..utils.util import PredictionException, map_class_to_label
from .text_handler import TextHandler


class TextClassifier(TextHandler):
    """Answers {label: probability}. One text at a time: an archive that uses it has batchSize 1."""

    ngrams = 2

    def preprocess(self, data: Any) -> Any:
        """Numbers of the text's n-grams. Raises PredictionException for more than one text, and for what is no text."""
        if len(data) != 1:
            raise PredictionException("the text classifier answers one text at a time; set batchSize to 1", 500)
        text = data[0].get("data") or data[0].get("body")
        if isinstance(text, bytes | bytearray):
            text = text.decode("utf-8", "replace")
        if not isinstance(text, str):
            raise PredictionException("send a text as 'data' or as the body", 400)
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        tokens = self._tokenize(self._remove_punctuation(self._remove_accented_characters(text)))
        numbers = [self._look_up(token) for token in self._ngrams(tokens)]
        return torch.as_tensor(numbers, dtype=torch.long, device=self.device)

    def _ngrams(self, tokens: list[str]) -> list[str]:
        """The tokens, then each run of 2 up to `ngrams` of them."""
        runs = range(2, self.ngrams + 1)
        return [*tokens, *(" ".join(tokens[at : at + n]) for n in runs for at in range(len(tokens) - n + 1))]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the one bag."""
        return super().inference(data, torch.as_tensor([0], device=self.device))

    def postprocess(self, data: Any) -> Any:
        """{label: probability}."""
        return map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping)
