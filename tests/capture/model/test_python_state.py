"""What a model remembers comes in and goes out, and is never dropped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import Bundle, open_bundle
from trueline.bundle.describe import describe
from trueline.capture.api import capture
from trueline.capture.model import explicit_state
from trueline.capture.model.arguments import Arguments
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.explicit_state import Explicit
from trueline.capture.proof import stateful
from trueline.capture.proof.probes import LIMIT, make_probes
from trueline.capture.proof.prove import prove
from trueline.capture.proof.value_probes import make_value_probes
from trueline.capture.proof.value_sweep import FEW
from trueline.errors import CaptureError, NotProven, UsageError
from trueline.recipe.contract import Recipe
from trueline.runtime.open import open_program, replay
from worlds import marks, models, recipes

pytestmark = pytest.mark.slow  # exports programs


class Mean(nn.Module):
    """A running mean and a counter, written in place."""

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.mean(0)  # written here
        self.count.add_(1)
        return x * self.scale + self.total / self.count


class Ring(nn.Module):
    """The last three records of a stream, one row for each stream of the batch; bound anew, not written in place."""

    def __init__(self, num_streams: int = 1) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(num_streams, 3, 8))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        here = nn.functional.one_hot(self.position % 3, 3).to(x.dtype)[:, :, None]
        self.cache = self.cache * (1 - here) + here * x[:, None]
        self.position = self.position + 1
        return {"logits": self.head(self.cache.mean(1))}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.mean = nn.Linear(8, 8), Mean()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mean(self.before(x))
        return found


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x])
        return x + self.seen.mean(0)


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x]).double()
        return x + self.seen.mean(0).float()


class Streams(nn.Module):
    """Keys and values of all steps so far, a row for each stream of the batch; and how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 0, 8))
        self.register_buffer("values", torch.zeros(1, 0, 8))
        self.register_buffer("calls", torch.tensor(0), persistent=False)
        self.key = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, self.key(x)[:, None]], 1)
        self.values = torch.cat([self.values, x[:, None]], 1)
        self.calls = self.calls + 1
        weights = torch.softmax((self.keys @ x[:, :, None])[:, :, 0], -1)
        return (weights[:, None] @ self.values)[:, 0] / self.calls


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def recipe(model: Callable[[], nn.Module], num_records: int = 4) -> Recipe:
    examples = torch.randn(num_records, 8, generator=torch.Generator().manual_seed(0))
    return recipes.untrained(model, name="stream", examples=lambda: examples)


def lifted(model: nn.Module, x: Tensor) -> EagerSession:
    found = explicit_state.lift_state(model.eval(), [Arguments((x,))])
    assert found is not None
    return EagerSession(found.eval(), explicit_state.with_state(found, Arguments((x,))))


def followed(bundle: Bundle, format: str, model: nn.Module, inputs: list[np.ndarray[Any, Any]]) -> None:
    """Asks a program call after call, handing its state on, beside a fresh copy of the model that remembers."""
    session, users = open_program(bundle, format), copy.deepcopy(model).eval()
    pairs = bundle.signature.state
    state = {name: bundle.golden()[0].inputs[name] for name in pairs}
    for x in inputs:
        answer = session.run({"x": x, **state})
        with torch.no_grad():
            wanted = users(torch.from_numpy(x))
        wanted = wanted["logits"] if isinstance(wanted, dict) else wanted
        np.testing.assert_allclose(next(iter(answer.values())), wanted.numpy(), atol=1e-5, rtol=1e-4)
        state = {given: answer[left] for given, left in pairs.items()}


def test_a_model_that_writes_its_buffers_is_refused_by_name_with_the_line_and_the_option(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match=r"keeps a state in its buffers \(total, count\)") as refused:
        capture(recipe(Mean), None, tmp_path / "b")
    assert marks.place_of(__file__, "written here") in refused.value.message
    assert "trueline capture --state explicit" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


class MadeAtItsFirstCall(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU())


def test_layers_that_take_their_size_from_the_first_call_are_no_state(tmp_path: Path) -> None:
    capture(recipe(MadeAtItsFirstCall), None, tmp_path / "b", formats=["torch_export"])
    answer = open_program(open_bundle(tmp_path / "b")).run({"input": np.ones((2, 8), np.float32)})["output"]
    assert answer.shape == (2, 6)


@pytest.mark.jobs
def test_state_is_lifted_to_inputs_and_outputs_and_every_format_follows_the_model(tmp_path: Path) -> None:
    model = Mean()
    captured = capture(recipe(lambda: model), None, tmp_path / "b", formats=["onnx", "torch_export"], state="explicit")
    assert {one.verdict for one in captured.programs} == {"proven"}
    bundle = open_bundle(tmp_path / "b")
    values = make_value_probes(bundle.golden()[0].inputs, bundle.signature)
    more = len(values) + len(FEW) + 3 + 4  # scales of values, far sizes and ends of values too
    more += 72  # magnitudes, of the lowest and largest numbers too, and the counter at the ends of its dtype
    more += 40  # and between the smallest that is answered by NaN and the largest that is not
    assert max(one.probes for one in captured.programs) <= LIMIT + more
    assert bundle.signature.state == {"state.total": "next.total", "state.count": "next.count"}
    assert [spec.role for spec in bundle.signature.inputs] == ["data", "state", "state"]
    random = np.random.default_rng(1)
    inputs = [random.standard_normal((1 + i % 3, 8)).astype(np.float32) for i in range(6)]
    for format in ("onnx", "torch_export"):
        followed(bundle, format, model, inputs)
        assert "second-call" in replay(bundle, open_program(bundle, format))
    assert (model.total == 0).all()
    assert "next.total of an answer is state.total of the next request" in describe(bundle)
    steps = [one for one in bundle.evidence() if one.probe.startswith("sequence ")]
    assert len({one.probe for one in steps}) == len(steps) / 2 == 10 + 4
    assert {one.verdict for one in steps} == {"agrees"}


@pytest.mark.jobs
@pytest.mark.slow
def test_a_cache_of_fixed_size_has_a_row_for_each_stream_and_batches_stay_free(tmp_path: Path) -> None:
    model = Ring()
    formats = ["onnx", "torch_export", "torchscript"]
    capture(recipe(lambda: model, 1), None, tmp_path / "b", formats=formats, state="explicit")
    bundle = open_bundle(tmp_path / "b")
    shapes = {spec.name: spec.shape for spec in (*bundle.signature.inputs, *bundle.signature.outputs)}
    assert shapes["state.cache"] == shapes["next.cache"] == ("batch", 3, 8)
    assert shapes["state.position"] == (1,)
    random = np.random.default_rng(2)
    inputs = [random.standard_normal((1, 8)).astype(np.float32) for _ in range(7)]
    for format in formats:
        followed(bundle, format, model, inputs)
    session = open_program(bundle)
    both = np.concatenate([inputs[0], inputs[1]])
    together = session.run(
        {"x": both, "state.cache": np.zeros((2, 3, 8), np.float32), "state.position": np.zeros(1, np.int64)}
    )
    alone = session.run(
        {"x": inputs[1], "state.cache": np.zeros((1, 3, 8), np.float32), "state.position": np.zeros(1, np.int64)}
    )
    np.testing.assert_allclose(together["logits"][1:], alone["logits"], atol=1e-6)


def test_the_state_of_a_submodule_has_its_qualified_name() -> None:
    eager = lifted(Nested(), torch.randn(4, 8))
    assert list(eager.signature.state) == ["state.mean.total", "state.mean.count"]


class Forgetful:
    """A program that drops what the model remembers: what ONNX makes of a written buffer."""

    format = "forgetful"

    def __init__(self, eager: EagerSession) -> None:
        self.eager, self.signature = eager, eager.signature

    def run(self, inputs: Any) -> Any:
        return {**self.eager.run(inputs), **{left: inputs[given] for given, left in self.signature.state.items()}}


class Remembering(Forgetful):
    """A program that goes on with its own memory, once it was asked often enough, instead of what it is given."""

    def __init__(self, eager: EagerSession) -> None:
        super().__init__(eager)
        self.asked, self.last = 0, {}  # type: ignore[var-annotated]

    def run(self, inputs: Any) -> Any:
        self.asked += 1
        again = self.asked > 2 * 5 and inputs.keys() >= self.last.keys()
        found = self.eager.run({**inputs, **self.last} if again else inputs)
        self.last = {given: found[left] for given, left in self.signature.state.items()}
        return found


@pytest.mark.parametrize("kind", [Forgetful, Remembering])
def test_a_program_that_drops_or_mixes_up_the_state_is_caught_by_the_sequences_alone(kind: Any) -> None:
    eager = lifted(Mean(), torch.randn(4, 8))
    right = prove(eager, eager, make_probes(eager.example, signature=eager.signature))
    assert right.proven
    assert stateful.prove_sequences(right, eager, eager).proven
    found = stateful.prove_sequences(right, kind(eager), eager)
    assert not found.proven
    assert found.reason.startswith("in sequence ")


def test_sequences_are_longer_than_the_state_and_end_as_the_model_that_remembers() -> None:
    eager = lifted(Ring(), torch.randn(1, 8))
    assert isinstance(eager.module, Explicit)
    first, second = stateful.sequences(eager, eager.module)
    assert len(first) == 10  # the state is 8 wide
    assert len(second) == 4
    fresh = Ring()
    fresh.load_state_dict({**eager.module._users.state_dict()})  # type: ignore[operator]
    for step in first:
        with torch.no_grad():
            fresh.eval()(torch.from_numpy(np.asarray(step.inputs["x"])))
        np.testing.assert_allclose(step.outputs["next.cache"], fresh.cache.numpy(), atol=1e-6)  # type: ignore[operator]
    for one, other in zip(first, second, strict=False):
        assert not np.array_equal(one.inputs["x"], other.inputs["x"])


def test_what_a_sequence_asks_is_not_asked_alone_unless_the_state_changes_with_it() -> None:
    eager = lifted(Ring(), torch.randn(1, 8))
    covered = stateful.covering(eager)
    alone = make_probes(eager.example, signature=eager.signature, covered=covered)
    everything = make_probes(eager.example, signature=eager.signature)
    left_out = {one.name for one in everything} - {one.name for one in alone}
    in_turns = [step.inputs["x"].tobytes() for track in stateful.sequences(eager, eager.module) for step in track]  # type: ignore[arg-type]
    dropped = [one for one in everything if one.name in left_out]
    assert dropped
    assert all(one.inputs["x"].tobytes() in in_turns for one in dropped)
    asked = {one.name.rpartition(", ")[2] for one in alone}
    assert asked >= {"as given", "random", "times 1000"}
    planted = [one.name for one in make_value_probes(eager.example, eager.signature)]
    assert any(name.endswith("x: one NaN") for name in planted)
    assert alone[0].name == everything[0].name
    assert stateful.num_calls(eager) == len(in_turns)
    plain = EagerSession(nn.Linear(8, 4).eval(), torch.randn(3, 8))
    assert stateful.num_calls(plain) == 0
    assert not any(map(stateful.covering(plain), everything))


@pytest.mark.jobs
def test_a_state_that_grows_begins_empty_and_every_format_follows_the_model(tmp_path: Path) -> None:
    model = Growing()
    formats = ["onnx", "torch_export", "torchscript"]
    capture(recipe(lambda: model), None, tmp_path / "b", formats=formats, state="explicit")
    bundle = open_bundle(tmp_path / "b")
    shapes = {spec.name: spec.shape for spec in (*bundle.signature.inputs, *bundle.signature.outputs)}
    assert shapes["state.seen"] == ("state.seen.0", 8)
    assert shapes["next.seen"] == ("next.seen.0", 8)
    assert bundle.signature.dims["state.seen.0"].min == 0
    assert bundle.golden()[0].inputs["state.seen"].shape == (0, 8)
    second = next(golden for golden in bundle.golden() if golden.case == "second-call")
    assert len(second.inputs["state.seen"]) == len(bundle.golden()[0].inputs["x"])
    random = np.random.default_rng(3)
    inputs = [random.standard_normal((1 + i % 3, 8)).astype(np.float32) for i in range(9)]
    for format in formats:
        followed(bundle, format, model, inputs)
        assert "second-call" in replay(bundle, open_program(bundle, format))
    assert model.seen.shape == (0, 8)


@pytest.mark.jobs
def test_a_cache_that_grows_has_a_row_for_each_stream_and_batches_stay_free(tmp_path: Path) -> None:
    model = Streams()
    capture(recipe(lambda: model, 1), None, tmp_path / "b", formats=["onnx", "torch_export"], state="explicit")
    bundle = open_bundle(tmp_path / "b")
    given = {spec.name: spec.shape for spec in bundle.signature.inputs}
    assert given["state.keys"][0] == given["state.values"][0] == "batch"
    assert given["state.keys"][1:] == given["state.values"][1:] == ("state.keys.1", 8)
    assert given["state.calls"] == ()
    random = np.random.default_rng(4)
    inputs = [random.standard_normal((1, 8)).astype(np.float32) for _ in range(7)]
    for format in ("onnx", "torch_export"):
        followed(bundle, format, model, inputs)


def test_a_state_that_changes_its_dtype_is_refused_with_both_its_forms(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"'seen' is \[0, 8\] of float32 and after a call \[4, 8\] of float64"):
        capture(recipe(Widening), None, tmp_path / "b", state="explicit")


@pytest.mark.parametrize("state", ["refuse", "explicit"])
def test_a_python_attribute_is_no_state_that_can_be_lifted_and_is_named_with_its_line(
    tmp_path: Path, state: Any
) -> None:
    with pytest.raises(NotProven, match=r"Python attributes it stores \(calls\)") as refused:
        capture(recipe(models.Counter), None, tmp_path / "b", state=state)
    assert models.place_of("counter") in refused.value.message
    assert "register_buffer" in refused.value.hint


@pytest.mark.jobs
def test_a_model_without_a_memory_is_captured_as_ever_when_its_state_is_to_be_explicit(tmp_path: Path) -> None:
    capture(recipe(Plain), None, tmp_path / "b", formats=["torch_export"], state="explicit")
    signature = open_bundle(tmp_path / "b").signature
    assert signature.state == {}
    assert [spec.name for spec in signature.inputs] == ["x"]


def test_a_choice_that_there_is_not_is_told_from_those_there_are(tmp_path: Path) -> None:
    wrong: Any = "implicit"
    with pytest.raises(UsageError, match="expected one of: refuse, explicit"):
        capture(recipe(Plain), None, tmp_path / "b", state=wrong)


def test_looking_for_written_buffers_leaves_the_model_as_it_was() -> None:
    model, x = Mean(), torch.randn(4, 8)
    assert explicit_state.written_buffers(model, [Arguments((x,))]) == ("total", "count")
    assert (model.total == 0).all()
    assert model.count == 0
