"""Signals: windows, frequencies."""
