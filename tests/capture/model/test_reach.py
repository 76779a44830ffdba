"""What is reached from a model is only looked at: nothing of it is asked to do anything."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from trueline.capture.model.python_state import Memento, Recall
from trueline.capture.model.reach import attributes, items_of


class LazyMap(dict[str, Any]):
    """Lists keys whose values it makes, or fails to, when they are read: transformers' maps of its classes."""

    def keys(self) -> Any:
        return ["absent"]

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def items(self) -> Any:
        return [(key, self[key]) for key in self.keys()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())


class NoTruth:
    """As torch's packed weights of a quantized layer."""

    def __bool__(self) -> bool:
        raise NotImplementedError("'__len__' is not implemented")


class Holder(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self._held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_dict_that_makes_its_values_is_kept_by_what_it_holds() -> None:
    held = LazyMap(kept=1)
    memento = Memento(Holder(held))
    dict.update(held, kept=2)
    memento.restore()
    assert dict.items(held) == {"kept": 1}.items()


def test_an_object_without_a_truth_value_is_an_attribute_like_any_other() -> None:
    assert "_held" in [kept.path for kept in attributes(Holder(NoTruth()))]


class Maker(OrderedDict[str, Any]):
    """Gives another value than it keeps."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) + 1

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("it is made once")


class Short(list[int]):
    def __len__(self) -> int:
        return 1


def test_what_a_container_keeps_is_put_back_in_its_order_whatever_its_class_makes_of_it() -> None:
    module = nn.Module()
    module.made, module.short = Maker(), Short([1, 2, 3])
    for key in ("b", "a", "c"):
        OrderedDict.__setitem__(module.made, key, ord(key))
    memento = Memento(module)
    OrderedDict.__delitem__(module.made, "b")
    module.short.append(4)
    memento.restore()
    assert list(module.made) == ["b", "a", "c"]
    assert module.made["b"] == ord("b") + 1
    assert list(iter(module.short)) == [1, 2, 3]


def test_a_tuple_that_torch_export_copies_is_no_change() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    recall = Recall(model)
    torch.export.export(model, (torch.randn(2, 3, 8),))
    assert recall.find_changed() == ()


class Collector(nn.Module):
    """Registers a hook at its first call and notes that it did, as transformers' models do to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.has_hooks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        self.into = found
        if not self.has_hooks:
            self.layer.register_forward_hook(lambda layer, args, output: self.into.append(output))
            self.has_hooks = True
        self.layer(x)
        return torch.stack(found)


def test_a_model_that_is_put_back_to_before_its_first_call_has_no_hooks_of_that_call() -> None:
    model, x = Collector(), torch.ones(3, 2)
    recall = Recall(model)
    first = model(x)
    with recall.as_before():
        assert not model.layer._forward_hooks
        assert torch.equal(model(x), first)
    assert len(model.layer._forward_hooks) == 1
    assert torch.equal(model(x), first)


class Asserts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)  # pytest makes a call of its own functions of it
        return x


def test_an_assert_that_pytest_has_rewritten_does_not_reach_into_pytest() -> None:
    assert "@pytest_ar" in Asserts.forward.__code__.co_names
    paths = [kept.path for kept in attributes(Asserts())]
    assert "Asserts.forward" in paths
    assert not [path for path in paths if "pytest" in path]


class Unhashable:
    """As a free size, while a model is traced."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_what_a_dict_keeps_is_read_without_hashing_its_keys(kind: type[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Unhashable(), Unhashable()
    kept = kind([(keys[0], 1), (keys[1], 2), ("name", 3)])

    def refuse(_: object) -> int:
        raise TypeError("unhashable type")

    monkeypatch.setattr(Unhashable, "__hash__", refuse)
    assert items_of(kept) == [(keys[0], 1), (keys[1], 2), ("name", 3)]


def test_an_ordered_dict_is_read_in_its_order() -> None:
    kept = OrderedDict(a=1, b=2, c=3)
    kept.move_to_end("a")
    assert items_of(kept) == [("b", 2), ("c", 3), ("a", 1)]
