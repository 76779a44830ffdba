"""The process of a parameter server: connections, log, snapshots. Without torch."""
