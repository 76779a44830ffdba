"""Where older handlers find `send_intermediate_predict_response`."""
