"""Schedulers of clusters: Slurm and the like start the processes of a job that lend it their cores."""
