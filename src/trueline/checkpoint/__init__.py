"""Checkpoints: model, optimizer and progress in one atomic write. Needs torch; the master never imports it."""
