"""`capture DIR | model.pt --trust`: a whole model that comes as files, captured as a recipe's model is.

A Hugging Face folder (config.json and model.safetensors) is built by transformers from its own classes, without code
of the folder and without the network; its examples are made from its config. A pickled module is unpickled only with
`trust`, which runs whatever its maker put into it. Both then climb the whole ladder and are proven like any other.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline import files
from trueline.capture.files.file_subject import plain_name
from trueline.capture.files.input_specs import Declared
from trueline.errors import UsageError, join_names
from trueline.recipe.contract import Recipe

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Read only with `trust`, and then by torch's loader of weights, which builds tensors and calls nothing else."""
BATCHES, LENGTHS = (5, 3), (11, 7)
IMAGE = 224
"""The size of an image where neither the config nor the preprocessor says one."""
SAMPLES = (4001, 3203)
"""Lengths of audio: a quarter of a second at 16 kHz."""


def is_model_folder(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face folder, and no folder of a recipe."""
    folder = Path(path)
    return (folder / CONFIG).is_file() and not (folder / "recipe.py").exists()


def of_folder(folder: Path, declared: Declared | None = None, *, trust: bool = False) -> Recipe:
    """The model in a Hugging Face folder as a recipe; `declared` in place of examples made from its config.

    With `trust` its weights may be a pickle (pytorch_model.bin). Raises UsageError for a folder without safetensors,
    with code of its own, or when transformers is not installed.
    """
    weights, pickled = ([folder / name for name in names if (folder / name).is_file()] for names in (WEIGHTS, PICKLED))
    config = _json(folder / CONFIG)
    if weights and trust:
        raise UsageError(f"the weights in {folder} are safetensors and need no trust; leave --trust out")
    if not weights and not (trust and pickled):
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".h5", ".ckpt"))
        raise UsageError(
            f"{folder} has no {WEIGHTS[0]} (has: {join_names(found)}); nothing else is read, because it is a pickle",
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
        return _built(folder, config, pickled=not weights)

    def examples() -> Any:
        return iter(declared.examples if declared else _batches(folder, config, model()))

    return _recipe(folder.resolve().name, digest, model, examples, declared)


def of_pickle(path: Path, declared: Declared) -> Recipe:
    """The module that is pickled at `path` as a recipe. Its `model()` unpickles, which runs what its maker put in.

    Raises UsageError when it holds no module.
    """

    def model() -> torch.nn.Module:
        import torch

        try:
            found = torch.load(path, map_location="cpu", weights_only=False)
        except Exception as error:
            told = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise UsageError(
                f"{path} cannot be unpickled: {type(error).__name__}: {told}",
                hint="the classes that it names have to be importable here: run this where its maker's code is",
            ) from error
        if isinstance(found, torch.nn.Module):
            return found.eval()
        raise _no_module(path, found)

    return _recipe(path.stem, files.sha256_file(path), model, lambda: iter(declared.examples), declared)


def weights_in(path: Path) -> int | None:
    """How many tensors the state_dict at `path` holds; None when it is none. Unpickles nothing but tensors."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - a pickle that names anything else is refused in many ways, and is no state_dict
        return None
    tensors = sum(isinstance(one, torch.Tensor) for one in found.values()) if isinstance(found, Mapping) else 0
    return tensors or None


def _no_module(path: Path, found: object) -> UsageError:
    what = f"a state_dict of {len(found)} entries" if isinstance(found, Mapping) else f"a {type(found).__name__}"
    return UsageError(
        f"{path} holds {what}, not a torch.nn.Module",
        hint="write a recipe whose model() builds the module and loads it with torch.load(..., weights_only=True)",
    )


def _recipe(name: str, digest: str, model: Any, examples: Any, declared: Declared | None) -> Recipe:
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no JSON object")
    return found


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "this is a Hugging Face folder, and transformers, which builds its model, is not installed",
            hint="pip install 'trueline[hf]'",
        ) from error
    return transformers


@contextmanager
def _without_bars(transformers: Any) -> Iterator[None]:
    """Without a bar of its own on stderr, where ours is, or nothing is wanted."""
    told = transformers.utils.logging
    shown = told.is_progress_bar_enabled()
    told.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            told.enable_progress_bar()


_CALLED = re.compile(r"GLOBAL ([\w.]+)")


def _built(folder: Path, config: Mapping[str, Any], *, pickled: bool) -> torch.nn.Module:
    """The model of the class that the config names. Raises UsageError when weights of it are missing."""
    import torch

    transformers = _transformers()
    named = [getattr(transformers, name, None) for name in config.get("architectures") or ()]
    build = next((one for one in named if one is not None and hasattr(one, "from_pretrained")), transformers.AutoModel)
    options = {"local_files_only": True, "use_safetensors": not pickled, "trust_remote_code": False}
    if pickled:
        options["weights_only"] = True
    if build is not transformers.AutoModel:
        del options["trust_remote_code"]  # a class of transformers itself runs no other code
    try:
        with _without_bars(transformers):
            model, loaded = build.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    except Exception as error:
        if "weights only load failed" in str(error).lower():  # torch's advice is to unpickle it all the same
            found = _CALLED.search(str(error))
            called = f" (it calls {found[1]})" if found else ""
            raise UsageError(
                f"the weights in {folder} are a pickle of more than tensors{called}, and nothing of it was unpickled",
                hint="weights need no such thing: take the model from whom you trust, as safetensors",
            ) from error
        told = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"transformers {transformers.__version__} cannot load {folder}: {told}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise UsageError(
            f"{folder} lacks {len(missing)} weights of {type(model).__name__} ({join_names(missing[:3])}, "
            "…), which would be random",
            hint="train what is missing and save the whole, or correct 'architectures' in its config.json",
        )
    model.config.use_cache = False
    return _answering(model.eval())


def _answering(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with its answer as a plain dict of what there is; transformers' own type is one that no program keeps."""
    import torch

    class Answering(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
            found = self.model(**inputs, return_dict=True)
            return {name: value for name, value in found.items() if value is not None}

    return Answering()


def _batches(folder: Path, config: Mapping[str, Any], model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Two batches that differ in what is free, made from the config. Raises UsageError for inputs unheard of."""
    import inspect

    inner: Any = model.model
    taken = set(inspect.signature(inner.forward).parameters)
    found = [_batch(folder, config, inner, taken, at) for at in range(len(BATCHES))]
    if not found[0]:
        raise UsageError(
            f"{type(inner).__name__} takes {join_names(sorted(taken))}, for which no examples can be made "
            "from its config",
            hint="declare its inputs: --example NAME=FP32[batch,80,frames]",
        )
    return found


def _batch(folder: Path, config: Mapping[str, Any], inner: Any, taken: set[str], at: int) -> dict[str, torch.Tensor]:
    import torch

    random, batch = torch.Generator().manual_seed(at), BATCHES[at]
    text, vision = config.get("text_config") or config, config.get("vision_config") or config
    made: dict[str, torch.Tensor] = {}
    vocabulary = text.get("vocab_size") or getattr(inner.config, "vocab_size", None)
    main = inner.main_input_name
    if "input_ids" in taken and vocabulary and main in ("input_ids", "pixel_values"):
        length = min(LENGTHS[at], _positions(inner.config))
        made["input_ids"] = torch.randint(0, int(vocabulary), (batch, length), generator=random)
        if "attention_mask" in taken:
            lengths = torch.arange(batch) % (length - 1) + 2
            made["attention_mask"] = (torch.arange(length) < lengths.flip(0)[:, None]).long()
            made["attention_mask"][0] = 1
        if getattr(inner.config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
            made["decoder_input_ids"] = torch.randint(0, int(vocabulary), (batch, max(2, length - 4)), generator=random)
    if "pixel_values" in taken and (main == "pixel_values" or "vision_config" in config):
        sizes = _image(folder, vision)
        made["pixel_values"] = torch.randn(batch, int(vision.get("num_channels", 3)), *sizes, generator=random)
    if main == "input_values":
        made["input_values"] = torch.randn(batch, SAMPLES[at], generator=random)
    return made


def _positions(config: Any) -> int:
    config = getattr(config, "text_config", None) or config
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return max(LENGTHS)


def _image(folder: Path, vision: Mapping[str, Any]) -> tuple[int, int]:
    size = vision.get("image_size")
    if size is None and (folder / "preprocessor_config.json").is_file():
        told = _json(folder / "preprocessor_config.json")
        size = told.get("crop_size") or told.get("size")
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge") or IMAGE
        size = [size.get("height") or edge, size.get("width") or edge]
    pair = size if isinstance(size, (list, tuple)) else [size or IMAGE] * 2
    return int(pair[0]), int(pair[-1])
