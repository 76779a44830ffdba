"""Hosts that join a job: each dials the master's one port, and lends its cores to the job's engine."""
