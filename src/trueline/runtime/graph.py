"""A program as text that a person reads: what `trueline inspect --graph` prints. Nothing is run.

onnx, openvino    ONNX's own textual form
torch_export      the graph as Python, one operator a line, with the shape of each value
torchscript       the program's source
aotinductor       nothing: it is machine code
"""

from __future__ import annotations

from pathlib import Path

from trueline.errors import UsageError


def text(format: str, path: Path) -> str:
    """The program file `path` in words. Raises BundleError, and UsageError for machine code."""
    if format in ("onnx", "openvino"):
        return _onnx(path)
    if format == "torch_export":
        return _export(path)
    if format == "torchscript":
        from trueline.runtime import script_archive

        return script_archive.source(path)
    raise UsageError(
        f"a program in format '{format}' is machine code and cannot be read",
        hint="ask for another program of the bundle with --format",
    )


def _onnx(path: Path) -> str:
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:  # their names, types and shapes are wanted, not their numbers
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
    found: str = onnx.printer.to_text(model)
    return found


def _export(path: Path) -> str:
    from trueline.runtime import export

    program = export.load(path)
    code: str = program.graph_module.print_readable(print_output=False, expanded_def=True)
    return f"{code}\n# {program.graph_signature}\n# ranges: {program.range_constraints}\n"
