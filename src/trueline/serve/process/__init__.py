"""Processes of the server: listeners, children, signals, several processes on one port."""
