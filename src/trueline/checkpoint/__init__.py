"""Checkpoints: model, optimizer and progress in one atomic write. Imports torch; the master never imports it."""
