"""Decodes images within bounds and makes them tensors, without torchvision.

`image_processing` of a derived handler may be any function from a PIL image to a tensor, torchvision's transforms too.
"""

import base64
import binascii
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from ..handler_utils.timer import timed
from ..utils.util import PredictionException, class_to_explain
from .base_handler import BaseHandler

MAX_PIXELS = 89_478_485
"""PIL warns above it; here it is a limit."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Channels first, values from 0 to 1."""
    values = np.asarray(image)
    if values.ndim == 2:
        values = values[:, :, None]
    tensor = torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))
    return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float()


def resize(image: Image.Image, size: int) -> Image.Image:
    """The shorter side becomes `size`, bilinear and antialiased."""
    width, height = image.size
    shorter = min(image.size)
    target = max(1, int(size * width / shorter)), max(1, int(size * height / shorter))
    return image.resize(target, Image.Resampling.BILINEAR)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The middle, `size` by `size`; a smaller image is padded with black."""
    width, height = image.size
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def imagenet(image: Image.Image) -> torch.Tensor:
    """The input of ImageNet's classifiers: 256, the middle 224, normalised, RGB."""
    tensor = to_tensor(center_crop(resize(image.convert("RGB"), 256), 224))
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    return (tensor - mean[:, None, None]) / std[:, None, None]


class VisionHandler(BaseHandler):
    """Base of the vision handlers: `image_processing` makes a tensor of an image."""

    image_processing: Callable[[Any], Any] = staticmethod(to_tensor)
    max_pixels: int | None = MAX_PIXELS

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels", True):
            self.max_pixels = None

    @timed
    def preprocess(self, data: Any) -> Any:
        """The batch as one tensor. Raises PredictionException (400, 413) for other data and for too large an image."""
        return torch.stack([self._tensor(row.get("data") or row.get("body")) for row in data]).to(self.device)

    def _tensor(self, image: Any) -> Any:
        if isinstance(image, str):
            try:
                image = base64.b64decode(image, validate=True)
            except (binascii.Error, ValueError) as error:
                raise PredictionException("an image sent as text is to be base64", 400) from error
        if isinstance(image, bytes | bytearray):
            return self.image_processing(self._decode_image(image))
        if not isinstance(image, list):
            raise PredictionException("send an image as 'data' or as the body, or its values as a JSON list", 400)
        try:
            return torch.tensor(image, dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise PredictionException(
                "the list of an image's values is ragged or holds what is no number", 400
            ) from error

    def _decode_image(self, content: bytes | bytearray) -> Image.Image:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is an error
                image = Image.open(io.BytesIO(content))
                width, height = image.size
                if self.max_pixels is not None and width * height > self.max_pixels:
                    raise PredictionException(
                        f"the image has {width} x {height} pixels, at most {self.max_pixels} go", 413
                    )
                image.load()
        except Image.DecompressionBombError as error:
            raise PredictionException("the image has too many pixels", 413) from error
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise PredictionException("the body is no image that can be read", 400) from error
        return image

    def get_insights(self, tensor_data: Any, _: Any, target: Any = 0) -> Any:
        """Integrated gradients of the class `target`, by captum."""
        try:
            from captum.attr import IntegratedGradients  # an extra of the operator
        except ImportError as error:
            raise PredictionException("explanations need the package captum on the server", 501) from error
        label = class_to_explain(target, self.inference(tensor_data))
        return IntegratedGradients(self.model).attribute(tensor_data, target=label, n_steps=15).tolist()
