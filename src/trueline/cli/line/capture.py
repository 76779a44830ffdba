"""`trueline capture`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trueline.cli.options import Output, checkpoint_path, overwrite_option, recipe_argument, verb
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.capture.proof.attempt import Captured

_EXAMPLES = """
trueline capture digits/recipe.py runs/digits-1
    ONNX and torch.export, each if it can be proven, else TorchScript; writes digits.bundle

trueline capture digits/recipe.py runs/digits-1 --any
    every format; those that can be proven go into the bundle

trueline capture digits/recipe.py runs/digits-1 --format onnx --out serving/digits.bundle --overwrite
    ONNX only, in place of an older bundle

trueline capture digits/recipe.py runs/digits-1 --for onnxruntime,cpp
    the programs that ONNX Runtime and a C++ program need

trueline capture resnet/recipe.py --weights resnet.safetensors
    weights in a file; the recipe needs model() and examples() alone

trueline capture resnet/recipe.py --no-checkpoint
    the model as model() makes it, with the weights that it loads itself

trueline capture digits/recipe.py runs/digits-1 --for onnxruntime@1.16
    ONNX with the operators of ONNX Runtime 1.16

trueline capture stream/recipe.py runs/stream-1 --state explicit
    a model with a memory: an input state.NAME and an output next.NAME

trueline capture digits/recipe.py runs/digits-1 --minutes 5
    what is proven after five minutes is sealed, the rest is listed as not tried

trueline capture model.onnx --out model.bundle
    wraps a program file

trueline capture model.ts --out model.bundle --example "ids=INT64[batch,length]<1000"
    TorchScript does not record its inputs; a .npz or .safetensors with a batch works too

trueline capture bert/ --out bert.bundle --for onnxruntime,openvino
    a Hugging Face folder with config.json and model.safetensors
"""

_TARGETS = ("onnxruntime", "openvino", "offload", "torch", "torchscript", "cpp", "aotinductor")
"""Those of `runtime.session.TARGETS`, which the help does not load."""


@verb(
    "capture", examples=_EXAMPLES, shows_progress=True, first=("out", "formats", "targets", "any_format", "overwrite")
)
@recipe_argument
@click.argument("checkpoint", required=False)
@click.option("--weights", metavar="FILE|FOLDER",
              help="Instead of CHECKPOINT: a state_dict, safetensors or a Hugging Face folder.")  # fmt: skip
@click.option("-o", "--out", metavar="BUNDLE", help="The bundle to write; else NAME.bundle.")
@click.option("--format", "formats", multiple=True, metavar="NAME",
              help="onnx, torch_export, torchscript, …; repeatable.")  # fmt: skip
@click.option("--for", "targets", metavar="NAMES",
              help=f"Where it is to run: {', '.join(_TARGETS)}; onnxruntime@1.16 for a release.")  # fmt: skip
@click.option("--any", "any_format", is_flag=True,
              help="One proven program is enough, of the formats asked for or of all.")  # fmt: skip
@click.option("--no-checkpoint", is_flag=True, help="Capture the model as the recipe's model() makes it.")
@click.option("--state", type=click.Choice(["refuse", "explicit"]), default="refuse", show_default=True,
              help="A model that writes its own buffers: refuse it, or make them inputs and outputs.")  # fmt: skip
@click.option("--allow-random", is_flag=True,
              help="Compare a model that draws random numbers by the distribution of its answers.")  # fmt: skip
@click.option("--table-rows", type=click.Choice(["float32", "float16", "int8"]), default="float32", show_default=True,
              help="How the rows of embedding tables are stored.")  # fmt: skip
@click.option("--table-file-mb", type=click.IntRange(min=1), metavar="MB", default=2_000, show_default=True,
              help="Size of the files that rows of a large table are cut into, beside the ONNX program.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), metavar="N",
              help="Try no further format after that; what is proven by then is sealed. Else 30 and more for large "
              "models.")  # fmt: skip
@overwrite_option
@click.option("--example", "inputs", multiple=True, metavar="INPUT",
              help="NAME=FP32[batch,3,size] or a file; see the guide.")  # fmt: skip
@click.option("--trust", is_flag=True, help="Unpickle: a module, which runs its maker's code, or a folder's weights.")
def command(
    recipe: str, checkpoint: str | None, weights: str | None, targets: str | None, any_format: bool, **given: Any
) -> Output:
    """Turn a checkpoint into a bundle of proven programs.

    They run without the model's code. Each is compared with the eager model on other batch sizes, other
    values and extremes before it is sealed. A program that disagrees on any probe is refused, with the line of your
    model that is the reason; `trueline bundle inspect` shows every attempt. CHECKPOINT is a checkpoint, a job, or
    (as --weights) a file of weights that fits the model in every name and shape.

    Without --format and --for the bundle takes ONNX and torch.export, each if it can be proven, and TorchScript if
    neither can. Formats that you ask for have to be proven, or nothing is written; with --any one of them is enough.
    The last lines name the program that is served.

    RECIPE may also be a program file (.onnx, .pt2, TorchScript), which is then wrapped as it is, or a Hugging Face
    folder; neither takes a CHECKPOINT.
    """
    from trueline.capture.files.program import is_program
    from trueline.capture.opsets import opset_for
    from trueline.runtime.session import FORMATS, formats_for

    if weights and checkpoint:
        raise UsageError(f"there is a checkpoint, '{checkpoint}', and --weights: leave one of them out")
    checkpoint = checkpoint or weights
    places = targets.split(",") if targets is not None else []
    formats = (*given.pop("formats"), *formats_for(places)) or (FORMATS if any_format else None)
    how = {"formats": formats, "one_is_enough": any_format, "opset": opset_for(places),
           "overwrite": given.pop("overwrite"), "minutes": given.pop("minutes")}  # fmt: skip
    captured = (_capture_file if is_program(recipe) else _capture_recipe)(recipe, checkpoint, given, how)
    programs = [one.as_record() | ({"line": one.line} if one.line else {}) for one in captured.programs]
    facts = {"path": str(captured.path), "digest": captured.digest, "serve": captured.serve, "programs": programs}
    lines = [*(one.summary for one in captured.programs), f"serve: {captured.serve}", f"bundle: {captured.path}"]
    return Output("\n".join(lines), facts)


def _capture_file(program: str, checkpoint: str | None, given: dict[str, Any], how: dict[str, Any]) -> Captured:
    from trueline.capture.api import capture_file

    if given["state"] != "refuse" or given["allow_random"] or given["table_rows"] != "float32":
        options = "--state, --allow-random and --table-rows"
        raise UsageError(f"{program} is a program: {options} are for a recipe's eager model")
    if checkpoint is not None:
        raise UsageError(f"{program} is a program and takes no checkpoint, got '{checkpoint}'")
    if given["no_checkpoint"]:
        raise UsageError(f"{program} is a program, which never has a checkpoint: leave --no-checkpoint out")
    out = Path(given["out"] or f"{Path(program).resolve().stem}.bundle")
    return capture_file(program, out, inputs=given["inputs"], trust=given["trust"], **how)


def _capture_recipe(recipe: str, checkpoint: str | None, given: dict[str, Any], how: dict[str, Any]) -> Captured:
    from trueline.capture.api import capture
    from trueline.recipe.contract import ONLY_CALLED
    from trueline.recipe.load import load_recipe

    if given["inputs"] or given["trust"]:
        raise UsageError("--example and --trust are for a file; a recipe has its own examples and model")
    if checkpoint is None and not given["no_checkpoint"]:
        if not Path(recipe).exists():
            load_recipe(recipe)  # says that there is no such recipe
        raise UsageError(
            "name the checkpoint, the folder of the job that trained it, or a file of its weights",
            hint="if model() loads its own weights, add --no-checkpoint",
        )
    if checkpoint is not None and given["no_checkpoint"]:
        raise UsageError(f"there is a checkpoint, '{checkpoint}', and --no-checkpoint: leave one of them out")
    loaded = load_recipe(recipe, needs=ONLY_CALLED)
    source = checkpoint_path(checkpoint) if checkpoint is not None else None
    out = Path(given["out"] or f"{loaded.name}.bundle")
    own = {name: given[name] for name in ("state", "allow_random", "table_rows", "table_file_mb")}
    return capture(loaded, source, out, **own, **how)
