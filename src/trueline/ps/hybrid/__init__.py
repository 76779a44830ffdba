"""Hybrid training: servers hold the tables, every worker has all else, whose gradients are summed by the all-reduce.

    forward, backward ──▶ all-reduce of dense gradients ──▶ push of the rows' gradients ──▶ all have pushed ──▶ apply

Steps, groups, regroups and checkpoints are those of `trueline.train`; docs/decisions/0024 has the argument.
"""
