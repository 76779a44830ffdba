"""TorchServe's REST, gRPC, management API, configuration, archives and workflows. `serve` does not know it."""
