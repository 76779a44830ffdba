"""`trueline torchserve import`."""

from pathlib import Path

import click

from trueline.cli.options import Output, overwrite_option, verb

_EXAMPLES = """
trueline torchserve import resnet.mar --out resnet.bundle --example "x=FP32[batch,3,224,224]"
    the archive's TorchScript becomes a bundle, proven against the file itself; an ONNX file names its own inputs

trueline torchserve import archives/densenet --overwrite
    the same from an archive that is a folder, in place of densenet.bundle
"""


@verb("import", examples=_EXAMPLES, shows_progress=True)
@click.argument("archive")
@click.option("-o", "--out", metavar="BUNDLE", help="The bundle to write; else NAME.bundle.")
@click.option("--example", "inputs", multiple=True, metavar="INPUT",
              help="An input of TorchScript: NAME=FP32[batch,3,9] or a file.")  # fmt: skip
@overwrite_option
def command(archive: str, out: str | None, inputs: tuple[str, ...], overwrite: bool) -> Output:
    """Turn a TorchServe archive into a bundle.

    Wraps its TorchScript or ONNX file as `trueline capture FILE` does; TorchScript does not record the shapes of its
    inputs, so give them with --example. The handler's code stays behind: a bundle takes tensors and gives tensors. An
    archive of weights and a model.py holds no program; the error explains how to capture it, and none of its code runs.
    ARCHIVE is a .mar, a .tar.gz or a folder.
    """
    import tempfile

    from trueline.errors import UsageError
    from trueline.serve.handlers.archive import stem, unpack
    from trueline.serve.models.sources import NAME

    if not Path(archive).exists():
        raise UsageError(f"there is no archive {archive}")
    with tempfile.TemporaryDirectory(prefix="trueline-import-") as folder:
        unpacked = unpack(Path(archive), Path(folder))
        manifest = unpacked.manifest
        if manifest.model_file:
            raise UsageError(
                f"{archive} holds weights and a model in Python ({manifest.model_file}), and no program",
                hint=f"unzip it, write a recipe whose model() builds the class of {manifest.model_file} and loads "
                f"{manifest.serialized_file or 'its weights'} with torch.load(..., weights_only=True), and run "
                "`trueline capture RECIPE CHECKPOINT`; or serve it as it is with --allow-code",
            )
        program = unpacked.folder / manifest.serialized_file
        if not manifest.serialized_file or not program.resolve().is_relative_to(unpacked.folder.resolve()):
            raise UsageError(
                f"{archive} names no serializedFile: its handler '{manifest.handler}' brings the model by itself",
                hint="serve it as it is: trueline serve --allow-code " + archive,
            )
        from trueline.capture.api import capture_file

        safe = NAME.fullmatch(manifest.model)  # else the name may be a path to elsewhere
        target = Path(out or f"{manifest.model if safe else stem(Path(archive).name)}.bundle")
        captured = capture_file(program, target, overwrite=overwrite, inputs=inputs)
    lines = [f"{one.format}: {one.verdict}" for one in captured.programs]
    lines += [f"bundle: {captured.path}", f"left behind: the handler '{manifest.handler}' and its labels; send tensors"]
    facts = {"path": str(captured.path), "digest": captured.digest, "handler": manifest.handler,
             "archive": unpacked.digest}  # fmt: skip
    return Output("\n".join(lines), facts)
