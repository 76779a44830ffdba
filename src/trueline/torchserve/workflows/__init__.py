"""Workflows: graphs of models and Python functions.

Source: TorchServe 0.12's workflows (frontend/server, ensemble and workflow; docs/workflows.md), as
docs/guides/torchserve.md describes them.
"""
