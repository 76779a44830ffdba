"""What a table answers in training, from servers, and afterwards, from a checkpoint."""

import numpy as np
import pytest
import torch
from torch import nn

import trueline
from trueline.errors import UsageError
from trueline.ps.model.embedding import Embedding, EmbeddingBag, TableModule
from trueline.ps.model.minibatch import Tables


class Rows:
    """A server in a dict: the row of an id is drawn by the id, and what was pulled is counted."""

    def __init__(self, dim: int = 4) -> None:
        self.dim = dim
        self.pulled: list[dict[str, list[int]]] = []

    def row(self, table: str, one: int) -> np.ndarray:
        return np.random.default_rng([one & 0xFFFFFFFF, len(table)]).normal(size=self.dim).astype(np.float32)

    def __call__(self, wanted):
        self.pulled.append({table: ids.tolist() for table, ids in wanted.items()})
        return {table: np.stack([self.row(table, int(one)) for one in ids]) for table, ids in wanted.items()}


def as_torch(rows: Rows, table: str, ids: torch.Tensor) -> nn.Embedding:
    """torch's own embedding with the same rows."""
    made = nn.Embedding(int(ids.max()) + 1, rows.dim)
    with torch.no_grad():
        for one in ids.unique().tolist():
            made.weight[one] = torch.from_numpy(rows.row(table, one))
    return made


def with_rows(module: TableModule, ids: list[int], seed: int = 0) -> TableModule:
    """`module` as a checkpoint leaves it."""
    rows = torch.randn(len(ids), module.settings.dim, generator=torch.Generator().manual_seed(seed))
    state = {**module.state_dict(), "ids": torch.tensor(sorted(ids), dtype=torch.int64), "rows": rows}
    module.load_state_dict(state)
    return module.eval()


class Two(nn.Module):
    """Two tables, one of which is called twice, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = Embedding(4)
        self.item = Embedding(4, padding_idx=0)
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        return self.head(torch.cat([self.user(x[:, 0]), self.item(x[:, 1]), self.item(x[:, 2])], dim=1))


def test_lookups_and_gradients_are_those_of_torchs_embedding():
    torch.manual_seed(0)
    model, rows = Two(), Rows()
    x = torch.tensor([[5, 1, 2], [7, 2, 0], [5, 0, 1]])
    user, item = as_torch(rows, "user", x), as_torch(rows, "item", x)
    with torch.no_grad():
        item.weight[0] = 0.0
    for again in range(3):
        tables = Tables(model)
        for _ in range(1 + again):  # the first pulls call by call, later ones all at once
            prediction = tables.predict(x)
            ahead = rows(prediction.wanted) if prediction else None
            with tables.minibatch(rows, x, prediction=prediction, rows=ahead) as minibatch:
                out = model(x)
                out.square().sum().backward()
                found = minibatch.gradients()
        expected = model.head(torch.cat([user(x[:, 0]), item(x[:, 1]), item(x[:, 2])], dim=1))
        torch.testing.assert_close(out, expected)
        user.zero_grad(), item.zero_grad()
        expected.square().sum().backward()
        assert found["user"][0].tolist() == [5, 7]
        assert found["item"][0].tolist() == [1, 2]  # the padding has no gradient
        for name, torchs in (("user", user), ("item", item)):
            ids, values = found[name]
            np.testing.assert_allclose(values, torchs.weight.grad[torch.from_numpy(ids)], rtol=1e-5, atol=1e-6)


def test_ids_are_learnt_from_the_inputs_and_pulled_ahead_for_all_calls_of_a_table():
    model, rows = Two(), Rows()
    tables = Tables(model)
    first, second = torch.tensor([[5, 1, 2], [7, 3, 4]]), torch.tensor([[-9, 8, 6], [7, 8, 2], [1, 5, 5]])
    assert tables.predict(first) is None
    with tables.minibatch(rows, first):
        model(first)
    assert len(rows.pulled) == 3
    prediction = tables.predict(second)
    assert {name: ids.tolist() for name, ids in prediction.wanted.items()} == {"user": [-9, 1, 7], "item": [2, 5, 6, 8]}
    ahead = rows(prediction.wanted)
    rows.pulled.clear()
    with tables.minibatch(rows, second, prediction=prediction, rows=ahead):
        model(second)
    assert rows.pulled == []


def test_a_wrong_prediction_changes_no_answer_and_pushes_no_row_that_was_not_read():
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.column = Embedding(4), 0

        def forward(self, x):
            return self.table(x[:, self.column]) + self.table(x[:, 2])

    model, rows = Choice(), Rows()
    tables = Tables(model)
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with tables.minibatch(rows, x):
        model(x)
    model.column = 1
    prediction = tables.predict(x)
    assert prediction.wanted["table"].tolist() == [1, 3, 4, 6]
    with tables.minibatch(rows, x, prediction=prediction, rows=rows(prediction.wanted)) as minibatch:
        out = model(x)
        out.sum().backward()
    expected = [rows.row("table", 2) + rows.row("table", 3), rows.row("table", 5) + rows.row("table", 6)]
    np.testing.assert_allclose(out.detach(), np.stack(expected), rtol=1e-6)
    assert minibatch.gradients()["table"][0].tolist() == [2, 3, 5, 6]
    assert tables.predict(x).wanted["table"].tolist() == [2, 3, 5, 6]


def test_ids_that_are_computed_in_the_model_are_pulled_when_they_are_looked_up():
    class Hashed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = Embedding(4)

        def forward(self, x):
            return self.table(x * 3 + 1)

    model, rows = Hashed(), Rows()
    tables = Tables(model)
    for start in range(12):
        x = torch.arange(start, start + 3)
        with tables.minibatch(rows, x, prediction=tables.predict(x), rows=None):
            out = model(x)
        np.testing.assert_array_equal(out.detach()[1], rows.row("table", (start + 1) * 3 + 1))


def test_modules_of_one_name_share_their_rows_and_their_gradients_are_summed():
    model, rows = nn.ModuleList([Embedding(4, name="words"), Embedding(4, name="words")]), Rows()
    tables = Tables(model)
    ids = torch.tensor([3, 1])
    with tables.minibatch(rows) as minibatch:
        (model[0](ids).sum() + 2 * model[1](ids[:1]).sum()).backward()
    assert list(tables.modules) == ["words"]
    found, values = minibatch.gradients()["words"]
    assert found.tolist() == [1, 3]
    assert values[:, 0].tolist() == [1, 3]
    state = tables.state("words", np.array([9, -2]), np.arange(8, dtype=np.float32).reshape(2, 4), np.zeros)
    model.load_state_dict({**model.state_dict(), **state})
    assert model[1].ids.tolist() == [-2, 9]
    assert model[0].rows[0].tolist() == [4, 5, 6, 7]


def test_a_module_in_two_places_of_the_model_is_one_table():
    model = nn.Module()
    model.items = model.alias = Embedding(4)
    tables = Tables(model)
    assert list(tables.modules) == ["items"]
    state = tables.state("items", np.array([3]), np.ones((1, 4), np.float32), lambda ids: np.zeros((len(ids), 4)))
    assert sorted(state) == sorted(model.state_dict())
    model.load_state_dict(state)


def test_a_table_by_its_place_and_one_by_its_name_are_not_shared_by_accident():
    model = nn.Module()
    model.items, model.others = Embedding(4), Embedding(4, name="items")
    with pytest.raises(UsageError, match="two tables are named 'items': one by its place in the model"):
        Tables(model)


def test_modules_of_one_name_with_other_settings_are_refused():
    with pytest.raises(UsageError, match="two tables are named 'words', with dim 4 and 8"):
        Tables(nn.ModuleList([Embedding(4, name="words"), Embedding(8, name="words")]))


def test_evaluation_from_servers_has_no_gradients():
    model, rows = Two().eval(), Rows()
    tables = Tables(model)
    with tables.minibatch(rows) as minibatch, torch.no_grad():
        model(torch.tensor([[5, 1, 2]]))
    assert minibatch.gradients() == {}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 100])
def test_a_checkpoints_table_finds_each_id_and_answers_zeros_for_others(count):
    ids = np.unique(np.random.default_rng(count).integers(-(2**63), 2**63 - 1, size=count))[:count].tolist()
    table = with_rows(Embedding(3), ids)
    if ids:
        torch.testing.assert_close(table(table.ids), table.rows, rtol=0, atol=0)
    others = [one for one in (-(2**63), -1, 0, 1, 2**63 - 1, *(one ^ 1 for one in ids)) if one not in ids]
    assert not table(torch.tensor(others)).any()
    assert table(torch.zeros(2, 0, 5, dtype=torch.int64)).shape == (2, 0, 5, 3)


def test_a_checkpoint_of_another_dim_or_of_unsorted_ids_is_refused():
    table = Embedding(3)
    with pytest.raises(RuntimeError, match=r"shape \[2, 4\] for 2 ids, and the model's table has dim 3"):
        table.load_state_dict({**table.state_dict(), "ids": torch.tensor([1, 2]), "rows": torch.zeros(2, 4)})
    with pytest.raises(RuntimeError, match="not sorted"):
        table.load_state_dict({**table.state_dict(), "ids": torch.tensor([2, 2]), "rows": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        table.load_state_dict({})


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("served", [True, False])
def test_bags_are_those_of_torchs_embedding_bag(mode, served):
    ids = torch.tensor([[1, 2, 2], [3, 0, 0], [0, 0, 0], [4, 1, 3]])
    rows, bag = Rows(), EmbeddingBag(4, mode, padding_idx=0)
    torchs = nn.EmbeddingBag(5, 4, mode=mode, padding_idx=0)
    with torch.no_grad():
        for one in range(1, 5):
            torchs.weight[one] = torch.from_numpy(rows.row("table", one))
    flat, offsets = ids.reshape(-1)[:-1], torch.tensor([0, 2, 2, 5, 11])
    if served:
        tables = Tables(bag)
        with tables.minibatch(rows) as minibatch:
            lines, vector = bag(ids), bag(flat, offsets)
            (lines.square().sum() + vector.square().sum()).backward()
        (torchs(ids).square().sum() + torchs(flat, offsets).square().sum()).backward()
        found, values = minibatch.gradients()["table"]
        assert found.tolist() == [1, 2, 3, 4]
        np.testing.assert_allclose(values, torchs.weight.grad[1:], rtol=1e-5, atol=1e-6)
    else:
        bag.load_state_dict({"ids": torch.arange(1, 5), "rows": torchs.weight.detach()[1:], "anchor": bag.anchor})
        lines, vector = bag.eval()(ids), bag(flat, offsets)
        masked = bag(ids.clamp(min=1), mask=ids != 0)
        torch.testing.assert_close(masked, lines)
    torch.testing.assert_close(lines, torchs(ids))
    torch.testing.assert_close(vector, torchs(flat, offsets))


def test_weights_of_a_sum_are_torchs():
    bag = with_rows(EmbeddingBag(4, "sum"), [0, 1, 2, 3])
    ids, weights = torch.tensor([[1, 2], [3, 9]]), torch.tensor([[0.5, 2.0], [1.0, 7.0]])
    expected = nn.functional.embedding_bag(
        ids.clamp(max=4), torch.cat([bag.rows, torch.zeros(1, 4)]), mode="sum", per_sample_weights=weights
    )
    torch.testing.assert_close(bag(ids, per_sample_weights=weights), expected)
    flat = bag(ids.reshape(-1), torch.tensor([0, 2]), weights.reshape(-1))
    torch.testing.assert_close(flat, expected)


def test_a_table_that_is_trained_without_servers_names_the_strategy():
    with pytest.raises(UsageError, match="trained by parameter servers") as caught:
        trueline.Embedding(4, name="user")(torch.tensor([1]))
    assert "--strategy ps" in caught.value.hint


def test_ids_that_are_no_integers_are_refused():
    table = with_rows(trueline.EmbeddingBag(4, name="user"), [1])
    with pytest.raises(UsageError, match="ids of table 'user' are float32, expected int64"):
        table(torch.ones(1, 1))
    assert table(torch.ones(1, 1, dtype=torch.int32)).shape == (1, 4)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dim": 0}, "dim of a table is 0"),
        ({"dim": 4, "evict": "lru"}, "evicts by lru, and its number of rows has no bound"),
        ({"dim": 4, "init": "xavier"}, "init of a table is 'xavier'"),
        ({"dim": 4, "scale": float("nan")}, "scale of a table is nan"),
        ({"dim": 4, "max_rows": -1}, "max_rows of a table is -1"),
    ],
)
def test_a_tables_settings_are_checked(options, why):
    with pytest.raises(UsageError, match=why):
        Embedding(**options)


def test_a_bag_refuses_arguments_that_do_not_go_together():
    bag = with_rows(EmbeddingBag(4, "mean"), [1])
    with pytest.raises(UsageError, match="ids with 1 dimensions without offsets"):
        bag(torch.tensor([1]))
    with pytest.raises(UsageError, match="mode mean was given weights"):
        bag(torch.tensor([[1]]), per_sample_weights=torch.ones(1, 1))
    with pytest.raises(UsageError, match="mode of a bag is 'median'"):
        EmbeddingBag(4, "median")


@pytest.mark.parametrize("dim", [1, 3, 16])
def test_gradients_of_rows_that_occur_often_have_the_bits_of_torchs_embedding(dim):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (400, 9), generator=generator) ** 2 // 300
    rows, module, head = Rows(dim), nn.Sequential(Embedding(dim)), torch.randn(400, 9, dim, generator=generator)
    expected = as_torch(rows, "0", ids)
    for scale in (1.0, 1e-30):
        with Tables(module).minibatch(rows) as minibatch:
            ((module(ids) * head).sin() * scale).sum().backward()
            (found, sums) = minibatch.gradients()["0"]
        expected.zero_grad()
        ((expected(ids) * head).sin() * scale).sum().backward()
        assert torch.equal(torch.from_numpy(sums), expected.weight.grad[torch.from_numpy(found)])


def test_a_penalty_on_the_gradient_of_looked_up_rows_reaches_the_rows():
    rows, module, ids = Rows(3), nn.Sequential(Embedding(3)), torch.tensor([[5, 2], [5, 9]])
    expected, sums = as_torch(rows, "0", ids), []
    for model in (module, expected):
        with Tables(module).minibatch(rows) as minibatch:
            looked_up = model(ids)
            (gradient,) = torch.autograd.grad(looked_up.pow(3).sum(), looked_up, create_graph=True)
            gradient.pow(2).sum().backward()
            sums.append(minibatch.gradients()["0"][1] if model is module else expected.weight.grad[[2, 5, 9]].numpy())
    assert np.allclose(*sums, rtol=1e-6, atol=0)


def test_a_lookup_of_no_ids_has_no_rows():
    module = nn.Sequential(Embedding(4))
    with Tables(module).minibatch(Rows(4)):
        assert module(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 4)
