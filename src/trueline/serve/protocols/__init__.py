"""Protocols of the server: routing, dispatch, errors, OpenAPI documents."""
