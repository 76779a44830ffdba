"""The part of TorchServe's wire protocol that handlers call."""

from ..handler_utils.utils import send_intermediate_predict_response

__all__ = ["send_intermediate_predict_response"]
