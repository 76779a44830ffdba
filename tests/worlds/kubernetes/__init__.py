"""A real Kubernetes on this machine for the tests: control plane, two nodes, pods of this machine's own Python."""
