"""Detects objects in an image."""

from typing import Any

import torch

from ..utils.util import map_class_to_label
from .vision_handler import VisionHandler


class ObjectDetector(VisionHandler):
    """Answers [{label: box, "score": s}, ...] for each image, without scores below `threshold`."""

    threshold = 0.5

    def preprocess(self, data: Any) -> Any:
        """A list: images of one batch may differ in size."""
        return [self._tensor(row.get("data") or row.get("body")).to(self.device) for row in data]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Boxes, labels and scores of each image. A scripted detector answers its losses as well; they are dropped."""
        with torch.inference_mode():
            found = self.model(data, *args, **kwargs)
        return found[1] if isinstance(found, tuple) else found

    def postprocess(self, data: Any) -> Any:
        answers = []
        for row in data:
            kept = row["scores"] >= self.threshold
            boxes, classes, scores = (row[key][kept].tolist() for key in ("boxes", "labels", "scores"))
            answers.append(
                [
                    map_class_to_label([[box]], self.mapping, [[number]])[0] | {"score": score}
                    for box, number, score in zip(boxes, classes, scores, strict=True)
                ]
            )
        return answers
