"""Which inputs an answer depends on: integrated gradients of the torch.export program, by Captum (extra `explain`).

The attributions of an answer add up to its difference from the answer to zeros, up to `convergence_delta`. Source:
Sundararajan, Taly, Yan, Axiomatic Attribution for Deep Networks, ICML 2017; captum.attr.IntegratedGradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from trueline.bundle.signature import Signature
from trueline.errors import RequestError, UsageError, join_names
from trueline.runtime import torch_export
from trueline.runtime.tensors import to_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

STEPS = 50
"""Points between zeros and the input, as Captum has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What each input adds to one output."""

    output: str
    target: int | None
    """Index along the output's last dimension; None for an output with one value for each record."""
    attributions: dict[str, Array]
    """For each float input, in its shape: what each element adds to the output."""
    convergence_delta: float
    """Largest distance, over the records, of their sum from what they should add up to."""


class Explainer:
    """Explains answers of one torch program."""

    def __init__(self, path: Path, signature: Signature) -> None:
        """Opens the torch.export program at `path`. Raises BundleError, UsageError without Captum."""
        try:
            from captum.attr import IntegratedGradients
        except ImportError as error:
            raise UsageError(
                "explanations need Captum, which is not installed", hint="pip install 'trueline[explain]'"
            ) from error
        self.signature = signature
        self._module = torch_export.load(path).module(check_guards=False)
        self._explained = [i for i, spec in enumerate(signature.inputs) if spec.dtype.kind == "f"]
        self._output = next((i for i, spec in enumerate(signature.outputs) if spec.dtype.kind == "f"), None)
        if not self._explained or self._output is None:
            raise UsageError(
                "integrated gradients need a float input and a float output; this model takes "
                f"{join_names(spec.datatype for spec in signature.inputs)}"
            )
        self._method: Any = IntegratedGradients(self._forward)

    def explain(self, inputs: Mapping[str, Array], target: int | None = None) -> Attribution:
        """Explains the first float output on `inputs`, for all records at the same `target`, an index along its last
        dimension; by default the largest of the first record. Raises RequestError for inputs outside the signature and
        targets outside the output."""
        self.signature.check(inputs)
        given = to_tensors(self.signature, inputs)
        with torch.no_grad():
            answer = self._ask(given)
        chosen = _target(answer, target)
        floats = tuple(given[i] for i in self._explained)
        rest = tuple(tensor for i, tensor in enumerate(given) if i not in self._explained)
        found, delta = self._method.attribute(
            floats,
            target=chosen,
            additional_forward_args=rest,
            n_steps=STEPS,
            internal_batch_size=len(floats[0]),
            return_convergence_delta=True,
        )
        names = [self.signature.inputs[i].name for i in self._explained]
        assert self._output is not None
        return Attribution(
            output=self.signature.outputs[self._output].name,
            target=chosen,
            attributions={name: np.asarray(one.detach()) for name, one in zip(names, found, strict=True)},
            convergence_delta=float(delta.abs().max()),
        )

    def _forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Captum passes the explained inputs first."""
        explained, rest = iter(given[: len(self._explained)]), iter(given[len(self._explained) :])
        return self._ask([next(explained if i in self._explained else rest) for i in range(len(self.signature.inputs))])

    def _ask(self, given: Any) -> torch.Tensor:
        assert self._output is not None
        found: torch.Tensor = tree_leaves(self._module(*given))[self._output]
        return found


def _target(answer: torch.Tensor, wanted: int | None) -> int | None:
    if answer.ndim == 1:
        if wanted not in (None, 0):
            raise RequestError(f"the output has one value for each record; target {wanted} is none of its")
        return None
    if answer.ndim > 2:
        raise RequestError(f"an output of {answer.ndim} dimensions has no one target to explain")
    classes = answer.shape[1]
    if wanted is None:
        return int(answer[0].argmax())
    if not 0 <= wanted < classes:
        raise RequestError(f"target {wanted} is outside the output's {classes} classes, 0 to {classes - 1}")
    return wanted
