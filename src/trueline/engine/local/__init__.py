"""The engine of one machine: a client, and the agent that forks the processes."""
