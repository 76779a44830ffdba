"""Metrics of a script: from its log, from event files of TensorBoard, from files of records."""
