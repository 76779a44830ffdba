"""`trueline capture`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from trueline.cli._progress import progress
from trueline.cli.options import checkpoint_path, json_option, quiet_option, recipe_argument, say, verb

_EXAMPLES = """
trueline capture digits/recipe.py runs/digits-1
    ONNX and torch.export, each if it can be proven, else TorchScript; writes digits.bundle

trueline capture digits/recipe.py runs/digits-1 --any
    every format there is; what can be proven goes into the bundle

trueline capture digits/recipe.py runs/digits-1 --format onnx --out serving/digits.bundle --overwrite
    ONNX only, in place of an older bundle

trueline capture digits/recipe.py runs/digits-1 --for onnxruntime,cpp
    the programs that ONNX Runtime and a C++ program need

trueline capture resnet/recipe.py --no-checkpoint
    the model as model() makes it, which loads its own weights

trueline capture digits/recipe.py runs/digits-1 --for onnxruntime@1.16
    ONNX in the operators that ONNX Runtime 1.16 knows

trueline capture stream/recipe.py runs/stream-1 --state explicit
    a model with a memory: it comes in as state.NAME and goes out as next.NAME

trueline capture model.onnx --out model.bundle
    wraps a program that comes as a file

trueline capture model.ts --out model.bundle --example "ids=INT64[batch,length]<1000"
    TorchScript does not say what it takes; a .npz or .safetensors with a batch says it too

trueline capture bert/ --out bert.bundle --for onnxruntime,openvino
    a Hugging Face folder with config.json and model.safetensors
"""

_TARGETS = ("onnxruntime", "openvino", "offload", "torch", "torchscript", "cpp", "aotinductor")
"""Those of `runtime.session.TARGETS`, which the help does not load."""


@verb("capture", examples=_EXAMPLES)
@recipe_argument
@click.argument("checkpoint", required=False)
@click.option("-o", "--out", metavar="BUNDLE", help="The bundle to write; NAME.bundle if left out.")
@click.option(
    "--format", "formats", multiple=True, metavar="NAME", help="onnx, torch_export, torchscript, …; repeatable."
)
@click.option(
    "--for",
    "targets",
    metavar="NAMES",
    help=f"Where it is to run: {', '.join(_TARGETS)}; onnxruntime@1.16 for a release.",
)
@click.option(
    "--any", "any_format", is_flag=True, help="One that is proven is enough, of those asked for or of all there are."
)
@click.option("--no-checkpoint", is_flag=True, help="Capture the model as the recipe's model() makes it.")
@click.option(
    "--state",
    type=click.Choice(["refuse", "explicit"]),
    default="refuse",
    show_default=True,
    help="A model that writes its own buffers: refuse it, or make them inputs and outputs.",
)
@click.option(
    "--allow-random", is_flag=True, help="Compare a model that draws random numbers by the distribution of its answers."
)
@click.option("--overwrite", is_flag=True, help="Replace a bundle that exists.")
@click.option(
    "--example", "inputs", multiple=True, metavar="INPUT", help="NAME=FP32[batch,3,size] or a file; see the guide."
)
@click.option("--trust", is_flag=True, help="Unpickle: a module, which runs its maker's code, or a folder's weights.")
@json_option
@quiet_option
def command(
    recipe: str,
    checkpoint: str | None,
    out: str | None,
    formats: tuple[str, ...],
    targets: str | None,
    any_format: bool,
    no_checkpoint: bool,
    state: Literal["refuse", "explicit"],
    allow_random: bool,
    overwrite: bool,
    inputs: tuple[str, ...],
    trust: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Turn a checkpoint into a bundle of proven programs.

    They run without the model's code. Each is compared with the eager model on other batch sizes, other
    values and extremes before it is sealed. One that disagrees on any probe is refused, with the line of your
    model that is the reason; `trueline bundle inspect` shows every attempt. CHECKPOINT is a checkpoint or a job.

    Without --format and --for the bundle takes ONNX and torch.export, each if it can be proven, and TorchScript where
    neither can. What you ask for has to be proven, or nothing is written; with --any one of it is enough. The last
    lines say which program is served.

    RECIPE may also be a program file (.onnx, .pt2, TorchScript), which is then wrapped as it is, or a folder of
    Hugging Face's; neither takes a CHECKPOINT.
    """
    from trueline.capture.api import capture, capture_file
    from trueline.capture.files.program import is_program
    from trueline.capture.onnx.opsets import opset_for
    from trueline.errors import UsageError
    from trueline.recipe.load import load_recipe
    from trueline.runtime.session import FORMATS, formats_for

    places = targets.split(",") if targets is not None else []
    wanted, opset = (*formats, *formats_for(places)), opset_for(places)
    asked = wanted or (FORMATS if any_format else None)
    with progress(quiet=quiet):
        if is_program(recipe):
            if state != "refuse" or allow_random:
                raise UsageError(
                    f"{recipe} is a program: --state and --allow-random are for a recipe, whose model can be asked"
                )
            if checkpoint is not None:
                raise UsageError(f"{recipe} is a program and takes no checkpoint, got '{checkpoint}'")
            if no_checkpoint:
                raise UsageError(f"{recipe} is a program, which never has a checkpoint: leave --no-checkpoint out")
            target = Path(out or f"{Path(recipe).resolve().stem}.bundle")
            captured = capture_file(
                recipe,
                target,
                formats=asked,
                one_is_enough=any_format,
                overwrite=overwrite,
                inputs=inputs,
                trust=trust,
                opset=opset,
            )
        else:
            if inputs or trust:
                raise UsageError("--example and --trust are for a file; a recipe says its own examples and model")
            if checkpoint is None and not no_checkpoint:
                raise UsageError(
                    "name the checkpoint, or the folder of the job that trained it",
                    hint="if model() loads its own weights, say so: --no-checkpoint",
                )
            if checkpoint is not None and no_checkpoint:
                raise UsageError(f"there is a checkpoint, '{checkpoint}', and --no-checkpoint: leave one of them out")
            found = load_recipe(recipe)
            captured = capture(
                found,
                checkpoint_path(checkpoint) if checkpoint is not None else None,
                Path(out or f"{found.name}.bundle"),
                formats=asked,
                one_is_enough=any_format,
                overwrite=overwrite,
                state=state,
                allow_random=allow_random,
                opset=opset,
            )
    lines = [one.told for one in captured.programs]
    facts = {
        "path": str(captured.path),
        "digest": captured.digest,
        "serve": captured.serve,
        "programs": [one.as_record() | ({"line": one.line} if one.line else {}) for one in captured.programs],
    }
    say("\n".join([*lines, f"serve: {captured.serve}", f"bundle: {captured.path}"]), facts, as_json=as_json)
