"""torch.onnx's own translations are listed once for many exports, and anew when another one was registered."""

from __future__ import annotations

from typing import Any

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry

from trueline.capture.onnx import torchlib_cache

pytestmark = pytest.mark.slow  # imports the exporter


@pytest.mark.jobs
def test_the_list_is_kept_until_a_translation_is_registered() -> None:
    from onnxscript.function_libs.torch_lib import registration

    usual: Any = torchlib_cache._APIS.get_torchlib_ops
    functions: Any = registration.default_registry._registry
    with torchlib_cache.cache_torchlib():
        before = torchlib_cache._APIS.get_torchlib_ops()
        assert torchlib_cache._APIS.get_torchlib_ops() is before
        known = next(iter(functions.values()))
        registration.default_registry.register(known.overloads[0], "test::another")
        try:
            after = torchlib_cache._APIS.get_torchlib_ops()
        finally:
            del functions["test::another"]
    assert {one.qualified_name for one in after} - {one.qualified_name for one in before} == {"test::another"}
    assert torchlib_cache._APIS.get_torchlib_ops is usual


def test_an_export_finds_the_same_translations_as_without() -> None:
    plain = ONNXRegistry.from_torchlib()
    with torchlib_cache.cache_torchlib():
        found = [ONNXRegistry.from_torchlib() for _ in range(2)]
    for registry in found:
        assert registry.functions.keys() == plain.functions.keys()
        for target, decomps in plain.functions.items():
            assert [one.onnx_function for one in registry.functions[target]] == [one.onnx_function for one in decomps]
            assert [one.signature for one in registry.functions[target]] == [one.signature for one in decomps]
