"""Summing gradients over members of a group: gloo, NCCL, and an order that does not depend on the members."""
