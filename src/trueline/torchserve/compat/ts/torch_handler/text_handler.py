"""Cleans text, cuts it into tokens and looks them up in the archive's vocabulary, without torchtext.

The vocabulary is `source_vocab.json`, {token: number}, or `source_vocab.pt`, a dict saved by torch.save. A pickled
Vocab object of torchtext is not unpickled; write it out once with `json.dump(vocab.get_stoi(), file)`.
"""

import json
import os
import pickle
import re
import string
import unicodedata
from typing import Any

import torch

from .base_handler import BaseHandler

_ENTITIES = re.compile(r"&(?:[a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")
_TAGS = re.compile(rf"<.*?>|{_ENTITIES.pattern}")
_CONTRACTIONS = (
    (re.compile(r"\bwon't\b"), "will not"),
    (re.compile(r"\bcan't\b"), "cannot"),
    (re.compile(r"\bshan't\b"), "shall not"),
    (re.compile(r"\blet's\b"), "let us"),
    (re.compile(r"n't\b"), " not"),
    (re.compile(r"'re\b"), " are"),
    (re.compile(r"'ll\b"), " will"),
    (re.compile(r"'ve\b"), " have"),
    (re.compile(r"'d\b"), " would"),
    (re.compile(r"'m\b"), " am"),
    (re.compile(r"\b(he|she|it|that|what|where|who|there)'s\b"), r"\1 is"),
)
_SPACED = re.compile(r"([.,()!?'])")
_BLANK = re.compile(r"<br\s*/>|[;:]")


class TextHandler(BaseHandler):
    """Base of the text handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: dict[str, int] = {}

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        self.source_vocab = self._vocabulary()

    def get_source_vocab_path(self, ctx: Any) -> str:
        """Raises FileNotFoundError."""
        for name in ("source_vocab.json", "source_vocab.pt"):
            path = os.path.join(ctx.system_properties["model_dir"], name)
            if os.path.isfile(path):
                return path
        raise FileNotFoundError("the archive holds neither source_vocab.json nor source_vocab.pt")

    def _vocabulary(self) -> dict[str, int]:
        path = self.get_source_vocab_path(self.context)
        if path.endswith(".json"):
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
        else:
            try:
                found = torch.load(path, weights_only=True)
            except pickle.UnpicklingError as error:
                raise RuntimeError(
                    "source_vocab.pt holds an object that is not unpickled here; write it out as source_vocab.json "
                    "with json.dump(vocab.get_stoi(), file)"
                ) from error
        if not isinstance(found, dict):
            raise TypeError(f"the vocabulary is to map tokens to numbers, it is {type(found).__name__}")
        return found

    def _look_up(self, token: str) -> int:
        """The token's number, or that of `<unk>`, or 0."""
        return self.source_vocab.get(token, self.source_vocab.get("<unk>", 0))

    def _expand_contractions(self, text: str) -> str:
        for pattern, words in _CONTRACTIONS:
            text = pattern.sub(words, text)
        return text.replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")

    def _remove_html_tags(self, text: str) -> str:
        # A "<" after a line's last ">" opens no tag; to search on from each takes the square of their number.
        lines = []
        for line in text.split("\n"):
            end = line.rfind(">") + 1
            lines.append(_TAGS.sub("", line[:end]) + _ENTITIES.sub("", line[end:]))
        return "\n".join(lines)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(str.maketrans("", "", string.punctuation))

    _remove_puncutation = _remove_punctuation

    def _tokenize(self, text: str) -> list[str]:
        """Lower-case words; punctuation that ends or encloses is a token of its own."""
        text = _BLANK.sub(" ", text.lower().replace('"', ""))
        return _SPACED.sub(r" \1 ", text).split()
