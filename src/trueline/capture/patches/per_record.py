"""A model whose code goes through the batch record by record, as a program for any batch.

`for row in x` and lists with one entry for each record make a constant of the batch. Such a model is traced for a
single record, where there is nothing to go through, and the program asks that for one record after the other, as the
model does. That records do not look at each other is taken for granted here and left to the proof, which asks batches
of many sizes. Source: torch's documentation of torch._higher_order_ops.map.
"""

from __future__ import annotations

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from trueline.capture.patches.constant_folding import Known
from trueline.errors import CaptureError

_MAP = torch.ops.higher_order.map_impl


class Single(torch.nn.Module):
    """`flat` for a batch of one, with what follows from the sizes computed once."""

    def __init__(self, flat: torch.nn.Module) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with Known():
            found: tuple[torch.Tensor, ...] = self.flat(*tensors)
        return found


class Records(torch.nn.Module):
    """The functional program `single`, which takes and gives tensors of one record, asked for each record of a batch.

    Raises CaptureError for a program that writes its buffers, or gives what has no row for its record.
    """

    def __init__(self, single: torch.export.ExportedProgram) -> None:
        super().__init__()
        signature = single.graph_signature
        values = {node.name: node.meta.get("val") for node in single.graph.nodes}
        answers = [values.get(str(name)) for name in signature.user_outputs]
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise CaptureError("the model writes into its own buffers or inputs when it is called")
        if not all(isinstance(one, torch.Tensor) and one.ndim and one.shape[0] == 1 for one in answers):
            raise CaptureError("the model gives something that has no row for each record")
        self._order: list[str | None] = []
        """Of what `single` takes: the weight's name here, or None for an input."""
        for spec in signature.input_specs:
            self._order.append(None if spec.kind is InputKind.USER_INPUT else self._kept(single, spec))
        # in a tuple it is no part of this module: its weights are
        self._held: tuple[GraphModule] = (single.graph_module,)

    @property
    def program(self) -> GraphModule:
        """What one record is asked."""
        return self._held[0]

    def _kept(self, single: torch.export.ExportedProgram, spec: torch.export.graph_signature.InputSpec) -> str:
        target = str(spec.target)
        tensor = single.state_dict[target] if target in single.state_dict else single.constants[target]
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"the model holds a {type(tensor).__name__} that no program of records can be given")
        name = target.replace(".", "_")
        if spec.kind is InputKind.PARAMETER:
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(name, tensor)
        return name

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = [getattr(self, name) for name in self._order if name is not None]

        def one(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs, rest = iter(given[: len(tensors)]), iter(given[len(tensors) :])
            found: tuple[torch.Tensor, ...] = self.program(
                *(next(inputs if name is None else rest) for name in self._order)
            )
            return found

        rows = _MAP(one, [tensor.unsqueeze(1) for tensor in tensors], weights)
        return tuple(row.squeeze(1) for row in rows)
