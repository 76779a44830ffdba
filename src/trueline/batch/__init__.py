"""Evaluation and prediction over many records, alone or by a pool of worker processes."""
