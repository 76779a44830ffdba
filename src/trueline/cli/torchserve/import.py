"""`trueline torchserve import`."""

from __future__ import annotations

from pathlib import Path

import click

from trueline.cli._progress import progress
from trueline.cli.options import json_option, quiet_option, say, verb

_EXAMPLES = """
trueline torchserve import resnet.mar --out resnet.bundle --example "x=FP32[batch,3,224,224]"
    the archive's TorchScript becomes a bundle, proven against the file itself; an ONNX file says its own inputs

trueline torchserve import archives/densenet --overwrite
    the same of an archive that is a folder, in place of densenet.bundle
"""


@verb("import", examples=_EXAMPLES)
@click.argument("archive")
@click.option("-o", "--out", metavar="BUNDLE", help="The bundle to write; NAME.bundle if left out.")
@click.option(
    "--example",
    "inputs",
    multiple=True,
    metavar="INPUT",
    help="What TorchScript takes: NAME=FP32[batch,3,9] or a file.",
)
@click.option("--overwrite", is_flag=True, help="Replace a bundle that exists.")
@json_option
@quiet_option
def command(
    archive: str, out: str | None, inputs: tuple[str, ...], overwrite: bool, as_json: bool, quiet: bool
) -> None:
    """Turn a TorchServe archive into a bundle.

    Its TorchScript or ONNX file is wrapped as `trueline capture FILE` does; TorchScript does not say the shapes of its
    inputs, so that --example does. The handler's code stays behind: a
    bundle takes tensors and gives tensors. An archive of weights and a model.py holds no program, and is told
    how to become one; nothing of its code is run. ARCHIVE is a .mar, a .tar.gz or a folder.
    """
    import tempfile

    from trueline.errors import UsageError
    from trueline.serve.handlers.archive import stem, unpack
    from trueline.serve.models.model_store import NAME

    if not Path(archive).exists():
        raise UsageError(f"there is no archive {archive}")
    with tempfile.TemporaryDirectory(prefix="trueline-import-") as folder, progress(quiet=quiet):
        found = unpack(Path(archive), Path(folder))
        told = found.manifest
        if told.model_file:
            raise UsageError(
                f"{archive} holds weights and a model in Python ({told.model_file}), and no program",
                hint=f"unzip it, write a recipe whose model() builds the class of {told.model_file} and loads "
                f"{told.serialized_file or 'its weights'} with torch.load(..., weights_only=True), and run "
                "`trueline capture RECIPE CHECKPOINT`; or serve it as it is with --allow-code",
            )
        program = found.folder / told.serialized_file
        if not told.serialized_file or not program.resolve().is_relative_to(found.folder.resolve()):
            raise UsageError(
                f"{archive} names no serializedFile: its handler '{told.handler}' brings the model by itself",
                hint="serve it as it is: trueline serve --allow-code " + archive,
            )
        from trueline.capture.api import capture_file

        name = told.model if NAME.fullmatch(told.model) else stem(Path(archive).name)  # it may be a path to elsewhere
        target = Path(out or f"{name}.bundle")
        captured = capture_file(program, target, overwrite=overwrite, inputs=inputs)
    lines = [f"{one.format}: {one.verdict}" for one in captured.programs]
    lines += [f"bundle: {captured.path}", f"left behind: the handler '{told.handler}' and its labels; send tensors"]
    facts = {"path": str(captured.path), "digest": captured.digest, "handler": told.handler, "archive": found.digest}
    say("\n".join(lines), facts, as_json=as_json)
