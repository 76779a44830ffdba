"""Models that the attack generator found sealed and wrong, shrunk to one idiom each: they are right now, or refused."""

from __future__ import annotations

import pytest
from bench.attack import grammar
from bench.attack.sealed import attempt
from bench.attack.shrink import kinds

from worlds.cases import few

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # captures each
IDIOMS = {idiom.name: idiom for idiom in grammar.idioms()}

FOUND = {
    "a loop over records and a branch on the batch": ("stack_records", "dict_of_sizes"),
    "a large column beside small ones": ("hidden_error",),
    "small answers": ("expm1_small", "log1p_small", "elu_small"),
    "a state that is not seen": ("counter_300", "module_random", "torch_tensor_in_list"),
    "NaN in, numbers out": ("max_dim", "topk"),
    "an index that eager refuses": ("embedding", "one_hot_matmul"),
    "a padded encoder": ("encoder_padding",),
    "positions that end": ("positions_128",),
    "an example of the user outside the claim": ("fraction_int", "root_int", "transpose_view"),
}
"""Class -> the idioms that were sealed and wrong, or narrow, in e036b43."""

TOGETHER = {
    "a tail that a condition does not hide": ("glu", "all_equal"),
    "a rounding that a remainder shows": ("glu", "remainder"),
    "a saturated gate": ("lengths_packed",),
    "a one that is not quite one": ("prod", "long_cast"),
    "sizes that end together, in a script": ("cache_positions", "attention_causal", "early_break"),
    "a check of values, in a script": ("mean_of_equal", "refused_values"),
    "a largest length that a trace takes for a constant": ("encoder_layer_padding", "lstm", "lengths_cut"),
    "the shorter of two sides ends, in a script": ("square_only", "grid", "rows_of_image"),
}
"""The same of idioms that were wrong together, in 7408b311."""


def source_of(*names: str) -> str:
    chosen = tuple(IDIOMS[name] for name in names)
    return grammar.source(grammar.Sketch(grammar.SHAPES[chosen[0].start] or "D", chosen, sizes=1))


@pytest.mark.jobs
@pytest.mark.parametrize("why", few(TOGETHER, 1))
def test_what_was_wrong_together_is_right(why: str) -> None:
    record = attempt(source_of(*TOGETHER[why]))
    assert kinds(record) == set(), record
    assert record["formats"], record


def test_an_error_of_torch_that_a_model_catches_ends_no_process() -> None:
    record = attempt(source_of("exception"))
    assert record["refusal"].startswith("NotProven"), record


@pytest.mark.long
def test_a_check_of_values_holds_in_the_program_of_a_model_as_it_stands() -> None:
    record = attempt(source_of("glu", "refused_values"))
    assert kinds(record) == set(), record
    assert "onnx" in record["formats"], record


@pytest.mark.parametrize(
    ("why", "name"), few([pytest.param(why, name, id=name) for why, names in FOUND.items() for name in names], 1)
)
def test_what_the_generator_found_is_right_or_refused(why: str, name: str) -> None:
    record = attempt(source_of(name))
    assert kinds(record) == set(), (why, record)
    assert "crash" not in record, record
    if "impure" in IDIOMS[name].tags:
        assert record["refusal"].startswith("NotProven"), record
    else:
        assert record["formats"], record
