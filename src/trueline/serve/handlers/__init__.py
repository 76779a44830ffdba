"""Handlers: code of model archives and recipes, in processes of its own."""
