"""The live page and the metrics of a job."""
