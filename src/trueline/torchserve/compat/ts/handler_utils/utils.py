"""Sends answers in pieces."""

from collections.abc import Mapping, Sequence
from typing import Any


def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: Mapping[int, str], message: str, code: int, context: Any = None
) -> None:
    """Sends a piece of each answer of the batch now; what the handler returns is the last piece."""
    if context is None or context.send_piece is None:
        raise ValueError("send_intermediate_predict_response needs the context that the handler was called with")
    context.send_piece(ret, req_id_map, code)
