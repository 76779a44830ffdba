"""Older handlers import `send_intermediate_predict_response` from here."""
