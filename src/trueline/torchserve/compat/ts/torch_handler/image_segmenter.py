"""Classifies the pixels of an image."""

from typing import Any

import torch

from .vision_handler import VisionHandler, imagenet


class ImageSegmenter(VisionHandler):
    """Answers [class, probability] for each pixel of the middle 224 x 224."""

    image_processing = staticmethod(imagenet)

    def postprocess(self, data: Any) -> Any:
        values = torch.softmax(data["out"] if isinstance(data, dict) else data, dim=1)
        best = torch.max(values, dim=1)
        return torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()
