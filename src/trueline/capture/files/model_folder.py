"""`capture DIR | model.pt --trust`: a model that comes as files, captured as a recipe's model is.

transformers builds a Hugging Face folder (config.json and model.safetensors) from its own classes, without code of the
folder and without the network; its examples are made from its config. A pickled module is unpickled only with `trust`,
which runs whatever its maker put into it.
"""

import functools
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trueline import files
from trueline.capture.files.file_subject import plain_name
from trueline.capture.files.input_specs import DeclaredInputs
from trueline.errors import UsageError, first_line, join_names
from trueline.recipe.contract import Recipe

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Read only with `trust`, and by torch's loader of weights, which builds nothing but tensors."""
BATCHES, LENGTHS = (5, 3), (11, 7)
IMAGE = 224
"""Size of an image that neither the config nor the preprocessor gives."""
SAMPLES = (4001, 3203)
"""Lengths of audio: a quarter of a second at 16 kHz."""


def is_model_folder(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face folder, and no folder of a recipe."""
    folder = Path(path)
    return (folder / CONFIG).is_file() and not (folder / "recipe.py").exists()


def read_folder(folder: Path, declared: DeclaredInputs | None = None, *, trust: bool = False) -> Recipe:
    """The model in a Hugging Face folder as a recipe, with the examples of `declared`, or made from its config.

    With `trust` its weights may be a pickle (pytorch_model.bin). Raises UsageError for a folder without safetensors,
    with code of its own, or when transformers is not installed.
    """
    weights, pickled = ([folder / name for name in names if (folder / name).is_file()] for names in (WEIGHTS, PICKLED))
    config = _json(folder / CONFIG)
    if weights and trust:
        raise UsageError(f"the weights in {folder} are safetensors and need no trust; leave --trust out")
    if not weights and not (trust and pickled):
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".h5", ".ckpt"))
        raise UsageError(
            f"{folder} has no {WEIGHTS[0]} (has: {join_names(others)}); nothing else is read, because it is a pickle",
            hint="convert it once where you trust it: model.save_pretrained(folder, safe_serialization=True)"
            + (", or let it be unpickled: --trust" if pickled else ""),
        )
    if config.get("auto_map"):
        raise UsageError(
            f"{folder} needs code of its own ({join_names(config['auto_map'].values())}), which is not run",
            hint="write a recipe whose model() builds it, and capture the recipe",
        )
    _transformers()
    shards = sorted({*folder.glob("*.safetensors" if weights else "pytorch_model*.bin"), *(weights or pickled)})
    digest = files.sha256_bytes("".join(files.sha256_file(one) for one in (folder / CONFIG, *shards)).encode())

    @functools.cache
    def model() -> torch.nn.Module:
        return _build(folder, config, pickled=not weights)

    def examples() -> Any:
        return iter(declared.examples if declared else _batches(folder, config, model()))

    return _recipe(folder.resolve().name, digest, model, examples, declared)


def read_pickle(path: Path, declared: DeclaredInputs) -> Recipe:
    """The module that is pickled at `path` as a recipe. Its `model()` unpickles, which runs what its maker put in, and
    raises UsageError when it holds no module."""

    def model() -> torch.nn.Module:
        try:
            module = torch.load(path, map_location="cpu", weights_only=False)
        except Exception as error:
            raise UsageError(
                f"{path} cannot be unpickled: {type(error).__name__}: {first_line(error)}",
                hint="the classes that it names have to be importable here: run this where its maker's code is",
            ) from error
        if isinstance(module, torch.nn.Module):
            return module.eval()
        is_dict = isinstance(module, Mapping)
        what = f"a state_dict of {len(module)} entries" if is_dict else f"a {type(module).__name__}"
        raise UsageError(
            f"{path} holds {what}, not a torch.nn.Module",
            hint=f"write a recipe whose model() builds the module: trueline capture recipe.py {path.name}",
        )

    return _recipe(path.stem, files.sha256_file(path), model, lambda: iter(declared.examples), declared)


def count_weights(path: Path) -> int | None:
    """Number of tensors in the state_dict at `path`; None when it is none. Unpickles nothing but tensors."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - torch refuses other pickles with many exceptions: they are no state_dict
        return None
    tensors = sum(isinstance(one, torch.Tensor) for one in loaded.values()) if isinstance(loaded, Mapping) else 0
    return tensors or None


def _recipe(name: str, digest: str, model: Any, examples: Any, declared: DeclaredInputs | None) -> Recipe:
    def absent(*_: object) -> Any:
        raise UsageError(f"'{name}' came as a file and can be captured, not trained", hint="write a recipe for it")

    return Recipe(
        name=plain_name(name),
        digest=digest,
        path=None,
        model=model,
        loss=absent,
        optimizer=absent,
        dataset=absent,
        examples=examples,
        dynamic_shapes=(lambda: declared.dynamic_shapes) if declared else None,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no JSON object")
    return content


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "this is a Hugging Face folder, and transformers, which builds its model, is not installed",
            hint="pip install 'trueline[hf]'",
        ) from error
    return transformers


_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def _build(folder: Path, config: Mapping[str, Any], *, pickled: bool) -> torch.nn.Module:
    """The model of the class that the config names. Raises UsageError when weights of it are missing."""
    transformers = _transformers()
    named = [getattr(transformers, name, None) for name in config.get("architectures") or ()]
    build = next((one for one in named if one is not None and hasattr(one, "from_pretrained")), transformers.AutoModel)
    options = {"local_files_only": True, "use_safetensors": not pickled, "trust_remote_code": False}
    if pickled:
        options["weights_only"] = True
    if build is not transformers.AutoModel:
        del options["trust_remote_code"]  # a class of transformers itself runs no other code
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # Trueline's own may be on stderr
    try:
        model, loaded = build.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    except Exception as error:
        if "weights only load failed" in str(error).lower():  # torch advises to unpickle it anyway
            call = _GLOBAL.search(str(error))
            called = f" (it calls {call[1]})" if call else ""
            raise UsageError(
                f"the weights in {folder} are a pickle of more than tensors{called}, and nothing of it was unpickled",
                hint="weights need no such code: take the model from a source that you trust, as safetensors",
            ) from error
        raise UsageError(
            f"transformers {transformers.__version__} cannot load {folder}: {first_line(error)}"
        ) from error
    finally:
        if shown:
            logging.enable_progress_bar()
    if missing := sorted(loaded["missing_keys"]):
        raise UsageError(
            f"{folder} lacks {len(missing)} weights of {type(model).__name__} ({join_names(missing[:3])}, "
            "…), which would be random",
            hint="train what is missing and save the whole, or correct 'architectures' in its config.json",
        )
    model.config.use_cache = False
    return _with_plain_outputs(model.eval())


def _with_plain_outputs(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with its answer as a plain dict without None; no program keeps transformers' own type."""

    class PlainOutputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
            outputs = self.model(**inputs, return_dict=True)
            return {name: value for name, value in outputs.items() if value is not None}

    return PlainOutputs()


def _batches(folder: Path, config: Mapping[str, Any], model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Two batches that differ in what is free, made from the config. Raises UsageError for unknown inputs."""
    inner: Any = model.model
    parameters = set(inspect.signature(inner.forward).parameters)
    batches = [_batch(folder, config, inner, parameters, at) for at in range(len(BATCHES))]
    if not batches[0]:
        raise UsageError(
            f"{type(inner).__name__} takes {join_names(sorted(parameters))}, for which no examples can be made "
            "from its config",
            hint="declare its inputs: --example NAME=FP32[batch,80,frames]",
        )
    return batches


def _batch(
    folder: Path, config: Mapping[str, Any], inner: Any, parameters: set[str], at: int
) -> dict[str, torch.Tensor]:
    random, batch = torch.Generator().manual_seed(at), BATCHES[at]
    text, vision = config.get("text_config") or config, config.get("vision_config") or config
    made: dict[str, torch.Tensor] = {}
    vocabulary = text.get("vocab_size") or getattr(inner.config, "vocab_size", None)
    main = inner.main_input_name
    if "input_ids" in parameters and vocabulary and main in ("input_ids", "pixel_values"):
        length = min(LENGTHS[at], _max_length(inner.config))
        made["input_ids"] = torch.randint(0, int(vocabulary), (batch, length), generator=random)
        if "attention_mask" in parameters:
            lengths = torch.arange(batch) % (length - 1) + 2
            made["attention_mask"] = (torch.arange(length) < lengths.flip(0)[:, None]).long()
            made["attention_mask"][0] = 1
        if getattr(inner.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
            made["decoder_input_ids"] = torch.randint(0, int(vocabulary), (batch, max(2, length - 4)), generator=random)
    if "pixel_values" in parameters and (main == "pixel_values" or "vision_config" in config):
        sizes = _image_size(folder, vision)
        made["pixel_values"] = torch.randn(batch, int(vision.get("num_channels", 3)), *sizes, generator=random)
    if main == "input_values":
        made["input_values"] = torch.randn(batch, SAMPLES[at], generator=random)
    return made


def _max_length(config: Any) -> int:
    config = getattr(config, "text_config", None) or config
    names = ("max_position_embeddings", "n_positions", "max_sequence_length")
    lengths = (getattr(config, name, None) for name in names)
    return next((length for length in lengths if isinstance(length, int) and length > 0), max(LENGTHS))


def _image_size(folder: Path, vision: Mapping[str, Any]) -> tuple[int, int]:
    size = vision.get("image_size")
    if size is None and (folder / "preprocessor_config.json").is_file():
        preprocessor = _json(folder / "preprocessor_config.json")
        size = preprocessor.get("crop_size") or preprocessor.get("size")
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge") or IMAGE
        size = [size.get("height") or edge, size.get("width") or edge]
    pair = size if isinstance(size, (list, tuple)) else [size or IMAGE] * 2
    return int(pair[0]), int(pair[-1])
