"""Loops that decode, select and fill are rewritten, and each rewrite answers as the loop does at sizes it never saw."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.examine import prove_onnx
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import survey
from worlds import TESTS, loops

pytestmark = pytest.mark.slow


def healed(model: nn.Module, x: Tensor, *fresh: Tensor, onnx: bool = False) -> str:
    """The diff of the rewrite of `model`, which was compared on `fresh` inputs too."""
    torch.manual_seed(0)
    name = "boxes" if isinstance(model, loops.Kept | loops.KeptOfTheRest) else "x"
    eager = EagerSession(copy.deepcopy(model).eval(), x, dynamic_shapes={name: {1: "length"} if x.ndim == 3 else {}})
    done = survey(model.eval(), calls_of(eager), onnx=prove_onnx if onnx else None, base=TESTS)
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    assert row.rewrite.onnx in (("proven",) if onnx else ("",))
    edited = patch_module(model, done.texts)
    with torch.no_grad():
        for one in fresh:
            torch.testing.assert_close(edited(one), model(one))
    return row.rewrite.diff


@pytest.mark.long
@pytest.mark.parametrize("kind", [loops.Viterbi, loops.ViterbiTurned])
def test_the_best_path_of_a_chain_is_found_by_two_scans_that_may_have_no_step(kind: type[nn.Module]) -> None:
    diff = healed(kind(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), torch.randn(1, 9, 4), onnx=True)
    assert diff.count(" = scan(") == 2
    assert "path.flip(0)" in diff


@pytest.mark.long
def test_greedy_decoding_of_ctc_writes_at_places_that_values_decide() -> None:
    diff = healed(loops.Collapsed(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), torch.randn(4, 9, 4), onnx=True)
    assert "index_put" in diff


@pytest.mark.long
def test_decoding_that_ends_early_appends_zeros_where_it_was_filled_up() -> None:
    diff = healed(loops.Sentence(), torch.randn(3, 4), 3 * torch.randn(7, 4), 9 * torch.randn(1, 4), onnx=True)
    assert "torch.zeros_like(scores)" in diff


@pytest.mark.long
@pytest.mark.parametrize("kind", [loops.Kept, loops.KeptOfTheRest])
def test_greedy_suppression_is_a_scan_over_what_is_left(kind: type[nn.Module]) -> None:
    boxes = [torch.rand(n, 4) * 2 for n in (1, 2, 9, 17)]
    diff = healed(kind(), torch.rand(5, 4) * 2, *boxes)
    assert "keep = order[left]" in diff


class Spared(nn.Module):
    """Rows near one that is kept are not, and what says so is read in its own step alone."""

    def forward(self, x: Tensor) -> Tensor:
        score = x[:, 0]
        distance = (x[:, None] - x[None]).abs().sum(2)
        order = score.argsort(descending=True)
        keep = torch.ones(len(x), dtype=torch.bool)
        for i in order:
            if keep[i]:
                near = (distance[i] < 2.0) & (score < score[i])
                keep = keep & ~near
        return keep * score


@pytest.mark.jobs
def test_a_name_that_each_step_computes_again_has_no_value_on_the_other_way() -> None:
    diff = healed(Spared(), torch.randn(5, 2), torch.randn(1, 2), torch.randn(17, 2))
    assert "torch.where(keep[" in diff


@pytest.mark.long
def test_a_loop_that_begins_with_numbers_carries_them_as_tensors() -> None:
    diff = healed(loops.Centres(), torch.randn(7, 4), torch.randn(1, 4), torch.randn(12, 4))
    assert "torch.full((), shift, dtype=torch.float32)" in diff


@pytest.mark.jobs
def test_a_list_may_give_its_name_to_the_tensor_that_is_made_of_it() -> None:
    assert " = scan(" in healed(loops.Smoothed(), torch.randn(3, 5, 4), torch.randn(2, 8, 4), torch.randn(1, 1, 4))


@pytest.mark.jobs
def test_a_loop_over_what_an_earlier_loop_kept_may_have_no_step() -> None:
    diff = healed(loops.Walked(), torch.randn(3, 5, 4), torch.randn(2, 8, 4), torch.randn(3, 1, 4))
    assert diff.count(" = scan(") == 2


@pytest.mark.long
def test_writes_into_what_a_loop_carries_become_new_values() -> None:
    diff = healed(loops.Pointer(), torch.randn(3, 5, 4), torch.randn(2, 7, 4), torch.randn(1, 1, 4))
    assert "chosen.index_put(" in diff
    assert "torch.where(chosen, " in diff


@pytest.mark.jobs
def test_a_tensor_that_a_loop_fills_backwards_is_what_a_scan_gives() -> None:
    diff = healed(loops.Filled(), torch.randn(3, 5, 4), torch.randn(2, 8, 4), torch.randn(1, 1, 4))
    assert "out = out.flip(0).movedim(0, 1)" in diff


@pytest.mark.jobs
def test_a_step_may_look_at_the_one_before_it() -> None:
    diff = healed(loops.Changes(), torch.randn(3, 5, 4), torch.randn(2, 8, 4), torch.randn(1, 1, 4))
    assert "x_t_less_1" in diff


def test_a_list_of_what_pairs_of_records_give_is_one_vmap() -> None:
    assert "torch.vmap(lambda a, b: " in healed(loops.Pairs(), torch.randn(3, 4), torch.randn(1, 4), torch.randn(6, 4))


@pytest.mark.jobs
def test_what_stands_before_a_break_is_done_once() -> None:
    diff = healed(loops.Settled(), torch.randn(3, 4), torch.randn(1, 4), 0.001 * torch.randn(6, 4))
    assert "ends" in diff


@pytest.mark.jobs
def test_a_loop_over_heads_that_writes_under_a_mask_and_breaks_is_rewritten_in_one_step() -> None:
    diff = healed(loops.Exits(), torch.randn(3, 4), 5 * torch.randn(9, 4), torch.randn(1, 4))
    assert "break" not in [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]


@pytest.mark.jobs
def test_arrays_of_numpy_stay_tensors() -> None:
    diff = healed(loops.Sorted(), torch.randn(3, 4), torch.randn(1, 4), 5 * torch.randn(6, 4))
    assert "np." not in "".join(line for line in diff.splitlines() if line.startswith("+"))


@pytest.mark.long
def test_what_stands_still_is_asked_as_a_tensor() -> None:
    diff = healed(loops.Ranked(), torch.randn(3, 5, 4), 3 * torch.randn(2, 8, 4), torch.zeros(1, 1, 4), onnx=True)
    assert "torch.isclose(new, v, atol=0.001).all()" in diff


@pytest.mark.long
def test_a_part_that_a_number_names_is_taken_from_what_all_answer() -> None:
    diff = healed(loops.Adapted(), torch.randn(5, 4), 3 * torch.randn(2, 4), torch.zeros(1, 4), onnx=True)
    assert "for part in self.adapters" in diff


@pytest.mark.jobs
def test_names_that_are_given_their_values_at_once_are_chosen_together() -> None:
    diff = healed(loops.Best(), torch.randn(3, 4), 3 * torch.randn(2, 4), torch.zeros(1, 4), onnx=True)
    assert diff.count("torch.where(chosen, ") == 2


@pytest.mark.parametrize("kind", [loops.Mixes, loops.MixesWhereItCan])
@pytest.mark.long
def test_a_loop_in_a_function_that_is_not_called_by_the_model_itself_is_rewritten_there(kind: type[nn.Module]) -> None:
    diff = healed(kind(), torch.randn(3, 5, 4), torch.randn(2, 8, 4), torch.randn(1, 1, 4), onnx=True)
    assert diff.count(" = scan(") == 1


def test_nothing_waits_for_a_part_that_is_never_called() -> None:
    model = loops.Spared().eval()
    found = survey(model, calls_of(EagerSession(model, torch.randn(3, 4))), onnx=None, base=TESTS)
    assert found.rows["spare"].why_not == "no probe of the model reached it"
    assert "spare" not in found.rows["(model)"].why_not


@pytest.mark.long
def test_what_is_missing_is_filled_from_what_was_filled_before_it() -> None:
    diff = healed(
        loops.FilledForward(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), torch.randn(4, 9, 4) - 1, onnx=True
    )
    assert "x_t_1_ago" in diff
    assert "torch.where(gone[:, None], x_t_1_ago, x_t)" in diff


@pytest.mark.long
def test_a_table_of_dynamic_programming_is_two_scans_that_carry_one_row_each() -> None:
    diff = healed(loops.Warped(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), torch.randn(1, 8, 4), onnx=True)
    assert diff.count(" = scan(") == 2
    assert "index_put" not in diff


@pytest.mark.long
def test_a_filter_looks_two_steps_back_also_where_there_is_only_one() -> None:
    diff = healed(loops.Resonant(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), torch.randn(1, 9, 4), onnx=True)
    assert "y_t_2_ago = y_t_1_ago" in diff


@pytest.mark.jobs
def test_what_is_to_come_is_added_up_from_the_end() -> None:
    diff = healed(loops.Returns(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), torch.randn(1, 9, 4))
    assert ".flip(0)" in diff


@pytest.mark.long
def test_a_tensor_that_is_written_where_values_say_is_carried_as_a_whole() -> None:
    diff = healed(loops.Family(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), 3 * torch.randn(4, 9, 4))
    assert "h.index_put(" in diff


@pytest.mark.long
def test_a_step_may_put_what_it_finds_into_a_list_of_its_own() -> None:
    diff = healed(loops.Spelt(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), torch.randn(4, 9, 4))
    assert "scan(" in diff


@pytest.mark.long
def test_a_loop_that_ends_in_the_middle_of_a_step_leaves_the_rest_of_it() -> None:
    diff = healed(loops.Joined(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), 0.5 * torch.randn(2, 9, 4))
    assert "while_loop(" in diff


@pytest.mark.long
def test_a_loop_without_end_is_run_once_where_a_name_begins_in_it() -> None:
    diff = healed(loops.Balanced(), torch.randn(3, 5, 4), torch.randn(2, 1, 4), 0.1 * torch.randn(1, 7, 4))
    assert diff.count("v = 1 / ") > 1


class _Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total, last = x.new_zeros(()), x[:, 0].clone()
        gone = last > 0
        for t in range(x.shape[1]):
            total[()] = total + x[0, t]
            last[gone] = x[gone, t] + total[()]
            last[:] = last + 1
        return last + total


@pytest.mark.jobs
def test_an_index_that_names_no_dimension_is_left_to_the_other_rewrites() -> None:
    x = torch.randn(3, 5)
    eager = EagerSession(_Summed().eval(), x, dynamic_shapes={"x": {1: "length"}})
    assert "(model)" in survey(_Summed().eval(), calls_of(eager), onnx=None, base=TESTS).rows


class StretchesItsBase(nn.Module):
    """A fraction of a size, beyond a length: a negative number to a fraction's power below it."""

    def forward(self, x: Tensor) -> Tensor:
        length, base = x.shape[1], 100.0
        if length > 6:
            base = base * (2.0 * length / 6 - 1.0) ** 1.5 + math.log(length)
        return x / base ** (torch.arange(4).float() / 4)


@pytest.mark.jobs
def test_a_fraction_that_a_branch_on_a_size_changes_is_chosen_with_torch_where() -> None:
    fresh = [torch.randn(2, length, 4) for length in (1, 2, 6, 7, 40)]
    diff = healed(StretchesItsBase(), torch.randn(3, 5, 4), *fresh, onnx=True)
    assert "torch.full((), length, dtype=torch.float64)" in diff
    assert "torch.log(" in diff


class Cell(nn.Module):
    """A recurrent cell that names the sizes of its input, and uses them more than once in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        state = torch.zeros(batch, 2, 4)
        outs = []
        for t in range(length):
            part = x[:, t].view(batch, 2, 4)
            state = torch.tanh(state + self.mix(part.reshape(batch, width)).view(batch, 2, 4))
            outs.append(state.reshape(batch, width) + length)
        return torch.stack(outs, 1)


def test_a_step_may_use_sizes_that_have_names_outside_of_the_loop() -> None:
    assert "sizes = torch.zeros((0, batch, width, length)" in healed(
        Cell(), torch.randn(2, 5, 8), torch.randn(3, 7, 8), torch.randn(1, 1, 8), onnx=True
    )


class Root(nn.Module):
    """Newton's method, until nothing changes or 30 steps are over."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        given = x.abs() + 0.5
        root, error, count = given.clone(), float("inf"), 0
        while error > 1e-3 and count < 30:
            new = 0.5 * (root + given / root).view(batch, length, -1)
            error = (new - root).abs().max().item() * batch / batch
            root = new
            count += 1
        return root + count


def test_a_loop_that_ends_by_a_value_or_by_its_count_is_a_while_loop() -> None:
    diff = healed(Root(), torch.randn(2, 5, 3), torch.randn(3, 7, 3) * 40, torch.randn(1, 1, 3), onnx=True)
    assert "while_loop" in diff
    assert "(count < 30)" in diff


class Greedy(nn.Module):
    """Writes a word in each step, until each record has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.words = nn.GRUCell(6, 6), nn.Linear(6, 9), nn.Embedding(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        state = x.mean(1)
        word = torch.ones(batch, dtype=torch.long)
        done = torch.zeros(batch, dtype=torch.bool)
        text = torch.zeros(batch, 10, dtype=torch.long)
        step = 0
        while step < 10 and not done.all():
            state = self.cell(self.words(word), state)
            word = torch.where(done, torch.zeros_like(word), self.out(state).argmax(-1))
            text[:, step] = word
            done = done | (word == 2)
            step += 1
        return text


def test_a_tensor_that_a_while_loop_fills_column_by_column_keeps_its_form() -> None:
    diff = healed(Greedy(), torch.randn(2, 5, 6), torch.randn(9, 7, 6), torch.randn(1, 1, 6), onnx=True)
    assert "while_loop" in diff


class Delays(nn.Module):
    """As many steps as the logarithm of the length, which has none of 1 and 2."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        found = int(math.log(length))
        weights, delays = torch.topk(x[..., 0], found, dim=-1)
        total = torch.zeros_like(x)
        for i in range(found):
            places = (torch.arange(length).repeat(batch, 1) + delays[:, i].view(batch, 1)) % length
            total = total + torch.gather(x, 1, places[..., None].expand_as(x)) * weights[:, i].view(batch, 1, 1)
        return total


def test_as_many_steps_as_a_number_computed_of_a_size_may_be_none() -> None:
    diff = healed(Delays(), torch.randn(2, 24, 3), torch.randn(3, 55, 3), torch.randn(2, 2, 3), torch.randn(1, 1, 3))
    assert "going" in diff
