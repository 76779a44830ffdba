"""From records to batches of tensors: feeds, seeding, worker processes, caches."""
