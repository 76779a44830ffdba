"""Labels, classes of a module, and the exception with which a handler sets the response's status."""

import inspect
import itertools
import json
import logging
import os
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)


class PredictionException(Exception):
    """Raised by a handler: every request of the batch gets `error_code` and `message`."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that the module itself defines; if given, subclasses of `parent_class`."""
    own = [one for _, one in inspect.getmembers(module, inspect.isclass) if one.__module__ == module.__name__]
    return own if parent_class is None else [one for one in own if issubclass(one, parent_class)]


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Labels by class number as text, from JSON: {"0": "cat"}, {"0": ["n01", "cat"]} or {"object_type_names": [...]}.

    None if there is no such file. Raises ValueError if it holds something else.
    """
    if not os.path.isfile(mapping_file_path):
        logger.warning("no %s: answers name classes by number", os.path.basename(mapping_file_path))
        return None
    with open(mapping_file_path, encoding="utf-8") as file:
        found = json.load(file)
    if not isinstance(found, dict):
        raise ValueError("index_to_name.json is to be an object of labels by class number")
    if isinstance(names := found.get("object_type_names"), list):
        return {str(number): str(name) for number, name in enumerate(names)}
    labels: dict[str, str] = {}
    for key, value in found.items():
        label = value[-1] if isinstance(value, list) and value else value
        if not isinstance(label, str):
            raise ValueError(f"the label of class '{key}' in index_to_name.json is to be text, it is {value!r}")
        labels[key] = label
    return labels


def map_class_to_label(
    probs: list[Sequence[Any]], mapping: dict[str, str] | None = None,
    lbl_classes: Iterable[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """One {label: probability} for each row; without a mapping the class number is the label."""
    if not isinstance(probs, list):
        raise TypeError("probabilities are to be a list of rows; call tolist() before")
    if mapping is not None and not isinstance(mapping, dict):
        raise TypeError("the mapping is to be a dict of labels by class number")
    classes = itertools.repeat(range(len(probs[0])) if probs else ()) if lbl_classes is None else lbl_classes
    rows = zip(classes, probs, strict=False)  # the default labels repeat without end
    return [
        {(str(one) if mapping is None else mapping[str(one)]): value for one, value in zip(row, values, strict=True)}
        for row, values in rows
    ]


def get_yaml_config(yaml_file_path: str) -> Any:
    """The values of a YAML file."""
    import yaml

    with open(yaml_file_path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def check_valid_pt2_backend(backend: str) -> bool:
    """Whether torch.compile knows the backend. Imports torch."""
    import torch

    return backend in torch.compiler.list_backends(exclude_tags=())


def class_to_explain(target: Any, scores: Any) -> int:
    """The class that a request's `target` names, of those in `scores` [rows, classes]. Raises PredictionException."""
    try:
        found = int(target)
    except (TypeError, ValueError):
        found = -1
    if not 0 <= found < scores.shape[-1]:
        raise PredictionException(f"'target' is to be the number of a class, 0 to {scores.shape[-1] - 1}", 400)
    return found
