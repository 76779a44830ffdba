"""TorchServe's package `ts` for users' handlers. Only the processes of handlers have it on their path."""
