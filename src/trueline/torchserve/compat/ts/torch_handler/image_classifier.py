"""Classifies images."""

from typing import Any

import torch

from ..utils.util import map_class_to_label
from .vision_handler import VisionHandler, imagenet


class ImageClassifier(VisionHandler):
    """Answers {label: probability} of the `topk` likeliest classes."""

    topk = 5
    image_processing = staticmethod(imagenet)

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    def postprocess(self, data: Any) -> Any:
        likely = torch.softmax(data, dim=1)
        values, classes = torch.topk(likely, min(self.topk, likely.shape[1]), dim=1)
        return map_class_to_label(values.tolist(), self.mapping, classes.tolist())
