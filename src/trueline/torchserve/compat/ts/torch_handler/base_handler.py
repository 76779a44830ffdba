"""Loads a model's file, and answers in three steps: preprocess, inference, postprocess.

No file is unpickled: torch.jit loads a TorchScript archive, torch.load(weights_only=True) a state dict. Anything
else is an error.
"""

import importlib
import os
import pickle
import time
import warnings
from typing import Any

import torch

from ..handler_utils.timer import timed
from ..utils.util import PredictionException, list_classes_from_module, load_label_mapping


class BaseHandler:
    """Derive from it and override what differs; the worker calls `initialize` and `handle`."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: torch.device = torch.device("cpu")
        self.map_location, self.initialized = "cpu", False
        self.context: Any = None
        self.manifest: dict[str, Any] = {}
        self.model_yaml_config: dict[str, Any] = {}
        self.model_pt_path: str | None = None
        self.explain, self.target = False, 0

    def initialize(self, context: Any) -> None:
        """Loads the model and its labels. Raises RuntimeError for a file in another form."""
        self.context, self.manifest = context, context.manifest
        self.model_yaml_config = context.model_yaml_config
        properties = context.system_properties
        if properties["gpu_id"] is not None and torch.cuda.is_available():
            self.map_location, self.device = "cuda", torch.device(f"cuda:{properties['gpu_id']}")
        model_dir = properties["model_dir"]
        model = self.manifest["model"]
        serialized, model_file = model.get("serializedFile"), model.get("modelFile")
        self.model_pt_path = os.path.join(model_dir, serialized) if serialized else None
        if model_file:
            self.model = self._load_pickled_model(model_dir, model_file, self.model_pt_path)
            self.model.to(self.device).eval()
        elif self.model_pt_path is not None:
            self.model = self._load_file(self.model_pt_path)
        else:
            raise RuntimeError("the manifest names neither a serializedFile nor a modelFile: there is no model to load")
        self._compile()
        self.mapping = load_label_mapping(os.path.join(model_dir, "index_to_name.json"))
        self.initialized = True

    def _load_file(self, path: str) -> Any:
        name = os.path.basename(path)
        if name.endswith((".pt", ".pth", ".ts")):
            return self._load_torchscript_model(path).eval()
        if name.endswith(".onnx"):
            import onnxruntime

            return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        raise RuntimeError(
            f"{name} is not loaded here; .pt (TorchScript) and .onnx are, and a state dict with a modelFile"
        )

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=r".*torch\.jit\.load")  # the archive was made long ago
                return torch.jit.load(model_pt_path, map_location=self.device)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            name = os.path.basename(model_pt_path)
            raise RuntimeError(
                f"{name} is no TorchScript archive ({str(error).splitlines()[0]}); a state dict needs a modelFile in "
                "the manifest, and a pickled module is not loaded at all"
            ) from error

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        """The one class of the archive's model file, with the weights of its state dict."""
        if not os.path.isfile(os.path.join(model_dir, model_file)):
            raise RuntimeError(f"the manifest names the model file {model_file}, which the archive does not hold")
        module = importlib.import_module(model_file.removesuffix(".py"))
        classes = [one for one in list_classes_from_module(module) if issubclass(one, torch.nn.Module)]
        leaves = [one for one in classes if not any(other is not one and issubclass(other, one) for other in classes)]
        if len(leaves) != 1:
            names = ", ".join(one.__name__ for one in leaves) or "none"
            raise ValueError(f"{model_file} is to define one model class; it defines {names}")
        model = leaves[0]()
        if model_pt_path is not None:
            try:
                state = torch.load(model_pt_path, map_location=self.device, weights_only=True)
            except pickle.UnpicklingError as error:
                raise RuntimeError(
                    f"{os.path.basename(model_pt_path)} holds more than weights and is not unpickled; "
                    "save it with torch.save(model.state_dict(), ...)"
                ) from error
            model.load_state_dict(state)
        return model

    def _compile(self) -> None:
        """torch.compile if model-config.yaml has it under `pt2`."""
        config = self.model_yaml_config.get("pt2")
        if isinstance(config, str):
            self.model = torch.compile(self.model, backend=config)
        elif isinstance(config, dict) and isinstance(config.get("compile"), dict):
            options = dict(config["compile"])
            if options.pop("enable", False):
                self.model = torch.compile(self.model, **options)

    @timed
    def preprocess(self, data: Any) -> Any:
        return torch.as_tensor(data, device=self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """One answer for each request."""
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        began = time.perf_counter()
        self.context = context
        if self._is_describe():
            output: Any = [self.describe_handle()]
        else:
            prepared = self.preprocess(data)
            if self._is_explain():
                output = self.explain_handle(prepared, data)
            else:
                output = self.postprocess(self.inference(prepared))
        context.metrics.add_time("HandlerTime", (time.perf_counter() - began) * 1e3)
        return output

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """The `get_insights` of the first request; its parameter `target` names the class to explain."""
        row = raw_data[0] if raw_data and isinstance(raw_data[0], dict) else {}
        return self.get_insights(data_preprocess, row.get("data") or row.get("body"), row.get("target") or 0)

    def get_insights(self, tensor_data: Any, _: Any, target: Any = 0) -> Any:
        """Override it to explain."""
        raise PredictionException(f"{type(self).__name__} explains nothing: it has no get_insights", 501)

    def describe_handle(self) -> Any:
        """Override it to describe."""
        return None

    def _has_header(self, header: str) -> bool:
        return bool(self.context is not None and self.context.get_request_header(0, header) == "True")

    def _is_explain(self) -> bool:
        self.explain = self._has_header("explain")
        return self.explain

    def _is_describe(self) -> bool:
        return self._has_header("describe")

    def get_device(self) -> torch.device:
        return self.device
