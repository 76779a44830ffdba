"""A call of `nn.GRU`, `nn.LSTM` or `nn.RNN` in a step of a scan or a while_loop, as torch's function.

    for t in range(words.shape[1]):                        weights = [*self.dec.parameters()]
        out, h = self.dec(words[:, t:t + 1], h)   ──▶      def step(h, words_t):
                                                               out, h = torch.gru(words_t.unsqueeze(1), h, weights, …)

In a step torch follows none of these modules ("Attempted to wrap RNN, GRU, or LSTM"), and each of the functions.
Condition: the call is given a state, whose parts have names afterwards. Source: torch/nn/modules/rnn.py.
"""

import ast

from torch import nn

from trueline.doctor.rewrites.scope import Scope, statements, stored_names, value_of


def call_functions(scope: Scope, body: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Statements for before the loop, which name the weights, and the step with the functions."""
    weights: dict[str, str] = {}
    step = [_with_function(scope, statement, weights) for statement in body]
    named = [one for owner, name in weights.items() for one in statements(f"{name} = [*{owner}.parameters()]")]
    return named, step


def _with_function(scope: Scope, statement: ast.stmt, weights: dict[str, str]) -> ast.stmt:
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(), state]) as target],
            value=ast.Call(func=ast.Attribute() as owner, args=[given, before], keywords=[]),
        ):
            module, parts = value_of(owner, scope.seen), 2 if isinstance(state, ast.Tuple) else 1
        case _:
            return statement
    function = _function_of(module)
    if not function or parts != 1 + isinstance(module, nn.LSTM):
        return statement
    assert isinstance(module, nn.RNNBase)
    name = weights.setdefault(ast.unparse(owner), scope.fresh(f"{owner.attr}_weights"))
    options = f"{module.bias}, {module.num_layers}, {module.dropout}, {'self.training' if module.dropout else False}"
    call = f"torch.{function}({ast.unparse(given)}, {ast.unparse(before)}, {name}, {options}"
    results = ", ".join(stored_names(target))
    return statements(f"{results} = {call}, {module.bidirectional}, {module.batch_first})")[0]


def _function_of(module: object) -> str:
    """Empty for another module, also one whose weights are computed of others (`torch.nn.utils.parametrize`)."""
    if type(module) is nn.RNN:
        return f"rnn_{module.nonlinearity}"
    return {nn.GRU: "gru", nn.LSTM: "lstm"}.get(type(module), "")
