"""State of a training job as plain data: the codec and the checkpoint. Needs torch; the master never imports it."""
