"""How a loss is tried with parts of a batch: held still, later in the job, and what it adds to buffers."""
