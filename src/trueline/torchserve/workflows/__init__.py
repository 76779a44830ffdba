"""Workflows: models of archives and Python functions that ask each other, as a graph.

The table reads from what is decided to what is run:

    spec      what a workflow's specification says: its nodes, in an order in which each comes after what it needs
    war       an archive of one (`.war`), laid out, with its specification read
    run       a workflow that is served: one request through its graph
    register  all that are served: registered whole or not at all, unregistered, restored

Source: TorchServe 0.12's workflows (frontend/server, ensemble and workflow; docs/workflows.md), as
docs/guides/torchserve.md says it.
"""
